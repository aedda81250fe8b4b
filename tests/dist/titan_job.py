# ruff: noqa: E402 — torchtitan asks for its device when it is imported
"""The runs of test_titan.py, through torchtitan's own Trainer: `python titan_job.py FOLDER`.

torchtitan is imported once; the ranks of every run are forked from here, so that a run costs no import. Each run writes
the losses, gradient norms and, of the first step, all gradients that rank 0 saw."""

import importlib.util
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

from composer2.dist.titan.compat import prepare

prepare()

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.distributed.activation_checkpoint import FullAC

from composer2.dist.meshes import Degrees
from composer2.dist.titan.config_registry import cpt_run, parallelism, rl_run
from composer2.dist.titan.convert import export_model, import_model
from composer2.dist.titan.data import CorpusLoader, SampleLoader, save_step
from composer2.dist.titan.loss import PolicyLoss
from composer2.dist.titan.model import copy_part
from composer2.model.checkpoint.huggingface import save_huggingface
from composer2.model.pretrain.corpus import CorpusConfig, SourceConfig
from composer2.model.tokenizer import Tokenizer
from composer2.rl.loss import LossConfig
from composer2.types import Sample


def sibling(name: str):
    """A module of this folder, which is no package."""
    spec = importlib.util.spec_from_file_location(f"composer2_dist_{name}", Path(__file__).parent / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


parity = sibling("parity")

STEPS = 4
LR = 0.01
LAYOUTS = {
    "one": (1, 1, 1),
    "cp2_ep2": (1, 2, 2),
    "dp2_ep2_ac": (2, 1, 2),
    "dp2_cp2_ep4": (2, 2, 4),
}


def samples_of(batch) -> list[Sample]:
    """The documents of a batch."""
    samples = []
    for row in range(len(batch.token_ids)):
        for document in range(int(batch.document_ids[row].max()) + 1):
            where = batch.document_ids[row] == document
            samples.append(Sample(**{name: getattr(batch, name)[row][where].numpy() for name in parity.PER_TOKEN}))
    return samples


def config(folder: Path, layout: tuple[int, int, int], *, steps: int, replay: bool = True, sizes=None):
    made = rl_run(sizes or parity.CONFIG, Degrees(), name="test", row_length=96)
    degrees = Degrees(dp=layout[0], cp=layout[1], ep=layout[2])
    made.parallelism = parallelism(degrees)
    made.dataloader = SampleLoader.Config(dataset_path=str(folder / "samples"))
    made.loss = PolicyLoss.Config(policy=LossConfig())
    made.optimizer.implementation = "for-loop"
    made.optimizer.param_groups[0].optimizer_kwargs |= {"lr": LR, "eps": 1e-3}
    made.training.steps, made.training.mixed_precision_param = steps, "float32"
    made.training.max_norm = 1e9  # a wrong factor on the gradient must show
    made.checkpoint = CheckpointManager.Config(enable=False)
    made.activation_checkpoint = None
    made.replay, made.replay_tau = replay, 0.0
    made.dump_folder = str(folder / "out")
    return made


def set_weights(trainer) -> None:
    """The test's weights in place of the small initial ones, so that experts matter."""
    whole = parity.build_model(torch.float32, trainer.model.config).state_dict()
    with torch.no_grad():
        for name, tensor in trainer.model.state_dict().items():
            copy_part(tensor, whole[name])


def train(made, *, own_weights: bool = True) -> dict:
    """Run it; what every step logged, the first step's gradients, and the selection biases at the end."""
    trainer = made.build()
    log: list[dict] = []
    gradients: dict = {}
    inner = trainer.metrics_processor.log

    def record(step, loss, max_loss, norm, extra_metrics=None):
        log.append({"step": step, "loss": loss, "norm": norm})
        inner(step, loss, max_loss, norm, extra_metrics=extra_metrics)

    trainer.metrics_processor.log = record
    step = trainer.optimizers.step

    def stop(*args, **kwargs):
        if not gradients:
            for name, parameter in trainer.model.named_parameters():
                grad = parameter.grad
                gradients[name.replace("_checkpoint_wrapped_module.", "")] = (
                    grad.full_tensor() if isinstance(grad, DTensor) else grad
                ).clone()
        return step(*args, **kwargs)

    trainer.optimizers.step = stop
    if own_weights:
        set_weights(trainer)
    trainer.train()
    trainer.close()
    biases = [layer.gate.e_score_correction_bias.clone() for layer in trainer.model.moe_layers()]
    return {"log": log, "gradients": gradients, "biases": biases}


def job_layouts(name: str):
    def run(folder: Path) -> dict:
        made = config(folder, LAYOUTS[name], steps=2)
        if name.endswith("_ac"):
            made.activation_checkpoint = FullAC.Config()
        return train(made)

    return run


def job_replay_off(folder: Path) -> dict:
    return train(config(folder, LAYOUTS["cp2_ep2"], steps=2, replay=False))


def job_formats(folder: Path) -> dict:
    """NVFP4 experts behind an MXFP8 wire, bf16 weights in the products."""
    sizes = replace(
        parity.CONFIG, hidden_size=64, moe_intermediate_size=32, expert_recipe="nvfp4", dispatch_wire="mxfp8"
    )
    made = config(folder, LAYOUTS["cp2_ep2"], steps=2, sizes=sizes)
    made.training.mixed_precision_param = "bfloat16"
    return train(made)


def job_save(folder: Path) -> dict:
    made = config(folder, LAYOUTS["cp2_ep2"], steps=STEPS)
    made.checkpoint = CheckpointManager.Config(enable=True, interval=2, last_save_model_only=False, keep_latest_k=0)
    return train(made)


def job_resume(layout):
    def run(folder: Path) -> dict:
        made = config(folder, layout, steps=STEPS)
        made.checkpoint = CheckpointManager.Config(enable=True, load_step=2, load_only=True)
        return train(made, own_weights=False)

    return run


def job_init(layout):
    """What a fresh model starts from: sums of its parameters, whatever the layout."""

    def run(folder: Path) -> dict:
        trainer = config(folder, layout, steps=1).build()
        sums = {}
        for name, parameter in trainer.model.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            sums[name] = whole.detach().double().square().sum()
        trainer.close()
        return {"sums": sums}

    return run


def job_seeded(folder: Path) -> dict:
    """Starts from a published model, converted."""
    made = config(folder, LAYOUTS["cp2_ep2"], steps=1)
    made.checkpoint = CheckpointManager.Config(
        enable=True, folder="elsewhere", load_only=True, initial_load_path=str(folder / "seed")
    )
    return train(made, own_weights=False)


def job_corpus(layout):
    """Continued pretraining on a small corpus; the bias follows the load."""

    def run(folder: Path) -> dict:
        sizes = replace(parity.CONFIG, vocab_size=300)
        made = cpt_run(sizes, Degrees(), name="test", row_length=64)
        plain = config(folder, layout, steps=2, replay=False)
        for name in ("parallelism", "optimizer", "training", "checkpoint", "activation_checkpoint", "dump_folder"):
            setattr(made, name, getattr(plain, name))
        made.training.seq_len, made.bias_rate = 64, 0.1
        made.dataloader = CorpusLoader.Config(
            dataset_path=str(folder / "tokenizer.json"), sizes=sizes, rows_per_step=4,
            corpus=CorpusConfig(sources=(SourceConfig(path=str(folder / "texts")),), heldout_frac=0.0),
        )  # fmt: skip
        return train(made)

    return run


def job_theirs(folder: Path) -> dict:
    return sibling("titan_theirs").compare(parity)


def job_refusals(folder: Path) -> dict:
    """What each forbidden setting says."""
    messages = {}
    for name, fields in {
        "tp": {"parallelism.tensor_parallel_degree": 2, "parallelism.expert_parallel_degree": 2},
        "backend": {"parallelism.spmd_backend": "spmd_types"},
        "compile": {"compile.enable": True},
        "graphs": {"training.disable_cuda_graphs": False},
        "data": {"dataloader.dataset_path": None},
        "length": {"training.seq_len": 97},
    }.items():
        made = config(folder, (1, 1, 1), steps=1)
        for path, value in fields.items():
            section, field = path.split(".")
            setattr(getattr(made, section), field, value)
        try:
            if name == "tp":  # before torchtitan counts ranks
                made.model_spec.model.update_from_config(config=made)
            made.build()
            messages[name] = "nothing"
        except ValueError as error:
            messages[name] = str(error)
    return messages


JOBS = [
    *((name, LAYOUTS[name][0] * LAYOUTS[name][1], job_layouts(name)) for name in LAYOUTS),
    ("theirs", 1, job_theirs),
    ("refusals", 1, job_refusals),
    ("seeded", 2, job_seeded),
    ("corpus_1", 1, job_corpus((1, 1, 1))),
    ("corpus_4", 4, job_corpus((2, 2, 4))),
    ("replay_off", 2, job_replay_off),
    ("formats", 2, job_formats),
    ("save", 2, job_save),
    ("resume_4", 4, job_resume((2, 2, 4))),
    ("resume_1", 1, job_resume((1, 1, 1))),
    ("init_1", 1, job_init((1, 1, 1))),
    ("init_4", 4, job_init((2, 2, 4))),
]


def rank_main(rank: int, world: int, port: int, run, folder: Path, result: Path) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    found = run(folder)
    if rank == 0:
        torch.save(found, result)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def fork_run(world: int, run, folder: Path, result: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                rank_main(rank, world, port, run, folder, result)
                status = 0
            finally:
                if status:
                    traceback.print_exc()
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    failed, deadline = False, time.monotonic() + 200
    while children and not failed and time.monotonic() < deadline:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child == 0:
            time.sleep(0.02)
            continue
        children.remove(child)
        failed = status != 0
    for child in children:
        os.kill(child, signal.SIGKILL)
    if failed or children:
        raise RuntimeError(f"{result.stem} failed on {world} ranks")


def main(folder: Path, only: list[str]) -> None:
    samples = samples_of(parity.build_batch())
    for step in range(STEPS):  # in another order each, so that plans differ
        save_step(folder / "samples", step, samples[step:] + samples[:step], parity.DENOMINATOR)
    debug = replace(parity.CONFIG, num_hidden_layers=4, n_routed_experts=8)  # the routes of config_registry.DEBUG
    for step in range(2):
        save_step(folder / "debug", step, samples_of(parity.build_batch(debug)), parity.DENOMINATOR)
    save_huggingface(folder / "published", parity.build_model(torch.float32))
    import_model(folder / "published", folder / "seed")
    (folder / "texts").mkdir()
    texts = ["".join(f"x{i * k} = {k} + {i}\n" for i in range(40 + 9 * k)) for k in range(6)]
    for k, text in enumerate(texts):
        (folder / "texts" / f"{k}.py").write_text(text)
    Tokenizer.train(texts, 300).save(folder / "tokenizer.json")
    for name, world, run in JOBS:
        if not only or name in only:
            started = time.monotonic()
            fork_run(world, run, folder, folder / f"{name}.pt")
            sys.stderr.write(f"{name}: {time.monotonic() - started:.1f} s\n")
    if (folder / "out" / "checkpoint").exists():
        export_model(folder / "out" / "checkpoint" / f"step-{STEPS}", parity.CONFIG, folder / "exported")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
