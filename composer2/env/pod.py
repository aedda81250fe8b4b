"""Which kind of pod this machine can make. In: a backend's name. Out: the backend, started, and why it was chosen.

Source: rows E1 E7.
Choice: a machine that does not permit isolation gets an error that says so, never a weaker backend it did not ask for.
"""

from __future__ import annotations

from composer2.env.local import LocalPods, ServedPods
from composer2.env.process import UNSAFE_FLAG, ProcessPods
from composer2.types import PodError, PodRefused

BACKEND_NAMES = ("auto", "local", "process")


def open_backend(name: str = "auto", allow_unsafe: bool = False) -> tuple[ServedPods, str]:
    """A backend whose server runs and has made one pod, and the reason for the choice, for the log.

    `auto` is `local`; only with `allow_unsafe` it becomes `process` where isolation is not permitted. PodError with
    the machine's reason when there is none, or when the server did not answer in time: that is no reason to go without
    isolation. ValueError for an unknown name.
    """
    if name not in BACKEND_NAMES:
        raise ValueError(f"backend is {name!r}, accepted is one of {', '.join(BACKEND_NAMES)}")
    if name == "process":
        return _open_process(allow_unsafe), "process pods, as asked for: nothing is isolated"
    pods = LocalPods()
    try:
        pods.start()
    except PodRefused as error:
        reason = f"this machine does not permit isolated pods: {error}"
        if name == "auto" and allow_unsafe:
            return _open_process(allow_unsafe), f"process pods, since {UNSAFE_FLAG} is given and {reason}"
        raise PodError(
            f"{reason}. Isolation needs root, or user namespaces for ordinary users; inside a container, the "
            f"permission to unshare and mount. {UNSAFE_FLAG} runs pods without isolation."
        ) from error
    return pods, "local pods: " + ", ".join(sorted(key for key, value in pods.guarantees().items() if value))


def _open_process(allow_unsafe: bool) -> ProcessPods:
    pods = ProcessPods(allow_unsafe=allow_unsafe)
    pods.start()
    return pods
