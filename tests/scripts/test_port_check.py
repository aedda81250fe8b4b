"""The port check: it passes with its keys, and a port with a known fault does not."""

import json

from composer2.model.router_replay import Selection


def run(script, folder, monkeypatch):
    monkeypatch.setattr("sys.argv", ["port_check", "--out", str(folder), "--quick"])
    code = script.main()
    return code, json.loads((folder / "port_check.json").read_text())


def test_gradients_of_the_port_are_those_of_the_trainer(load_script, tmp_path, monkeypatch):
    code, figures = run(load_script("port_check"), tmp_path, monkeypatch)
    assert code == 0
    errors = [name for name in figures if "grad_error" in name]
    assert len(errors) == 4
    for name in errors:
        assert 0 < figures[name] <= 1e-5, name
    assert figures["replay_effect"] > 0.01
    assert figures["num_steps"] == 2
    assert 0 < figures["num_samples"] <= 2 * 4 * 6
    assert figures["num_parameters_compared"] > 30


def test_a_port_that_forgets_the_routes_is_found(load_script, tmp_path, monkeypatch):
    script = load_script("port_check")
    monkeypatch.setattr(
        script, "replay_selection", lambda scores, ranking, own, routes, tau: Selection(expert_ids_TK=own)
    )
    code, figures = run(script, tmp_path, monkeypatch)
    assert code == 1
    assert figures["max_rel_grad_error"] > 0.01
    assert figures["max_rel_grad_error_replay_off"] <= 1e-5
