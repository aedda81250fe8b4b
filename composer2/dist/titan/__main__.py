"""`torchrun --standalone --nproc_per_node=N -m composer2.dist.titan --config NAME [--section.field VALUE]`: train.

N nodes: `--nnodes N --rdzv_backend c10d --rdzv_endpoint HOST:PORT` in place of `--standalone`.

Source: report §6.1; row D1. torchtitan's own entry point, after what `compat` supplies.
"""

from __future__ import annotations

import sys

from composer2.dist.titan.compat import prepare


def main() -> None:
    """torchtitan's own main, with this package as its module."""
    prepare()
    from torchtitan.train import main as train

    if not any(argument.split("=")[0] == "--module" for argument in sys.argv[1:]):
        sys.argv[1:1] = ["--module", "composer2.dist.titan"]
    train()


if __name__ == "__main__":
    main()
