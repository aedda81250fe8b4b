"""composer2's model under torchtitan's own Trainer: `torchrun … -m composer2.dist.titan --config NAME`.

torchtitan brings meshes, FSDP2, the training loop, optimizers, schedules, activation checkpoints, metrics and
distributed checkpoints. From here come the model itself, as it is on one device (one model is better than two), and
what torchtitan lacks: latent context parallelism, router replay, packed rows, the policy loss, MXFP8 dispatch and NVFP4
experts. Nothing of torchtitan is patched; what a machine without GPU needs stands in `compat.py`.

    config_registry.py   runs by name        model.py    the model, its initialisation and its parallelisation
    data.py              rows of a step      loss.py     policy loss       trainer.py   the steps that differ
    convert.py           published models in, safetensors out

Source: report §6.1; rows D1 to D6. torchtitan 0.3.0 on torch 2.14.
"""
