"""Fault 84: a checkpoint holds the position in the data but not what was generated and not yet trained."""

import json

import pytest

from composer2.rl.system.reconciler import Reconciler, ReconcilerConfig

CONFIG = ReconcilerConfig(prompts_per_step=2, group_size=1, num_slots=4, max_staleness=1, min_valid=1)


def generate(machine, count):
    for _ in range(count):
        start = machine.next_start()
        machine.rollout_ended(start.position, start.attempt, 0)
        machine.verified(start.position, start.attempt, 0)


@pytest.mark.parametrize("kept", [None, ()])
def test_every_id_is_trained_exactly_once_across_a_kill(kept):
    """Ids 0..15: generate 4, train 2, kill, resume. The other two are kept, or made again if their data is gone."""
    machine = Reconciler(CONFIG)
    ids = [str(index) for index in range(16)]
    for task_id in ids:
        machine.offer(task_id)
    generate(machine, 4)
    assert machine.begin_step().task_ids == ("0", "1")
    machine.end_step()
    saved = json.dumps(machine.snapshot())
    generate(machine, 2)  # after the checkpoint: dies with the process
    del machine

    machine = Reconciler.restore(json.loads(saved), CONFIG, kept_positions=kept)
    assert not any(machine.offer(task_id) for task_id in ids)  # a restarted data loader begins again
    while machine.version < 8:
        if machine.begin_step() is None:
            generate(machine, 1)
        else:
            machine.end_step()
    assert machine.trained == ids
    assert machine.trained_twice == 0
