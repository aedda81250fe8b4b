"""Fault 40: one malformed JSON argument crashes the whole batch."""

import asyncio

from composer2.env.json_template import JsonTemplate
from composer2.types import RolloutStatus


def test_error_goes_to_the_model_and_the_group_is_whole(fakes):
    tokenizer = fakes.ByteTokenizer()
    template, task = JsonTemplate(tokenizer), fakes.make_task()
    broken = '{"name": "edit", "arguments": {"a":'
    good = fakes.json_line("edit", line=2, old=" >", new=" >=") + "\n" + fakes.json_line("run")
    scripts = [[broken, good, "bye"], [good, "bye"]]

    async def group():
        return await asyncio.gather(
            *(
                fakes.run_script(
                    task,
                    [[*tokenizer.encode(t), template.stop_ids[0]] for t in script],
                    template=template,
                    max_tokens_per_turn=200,
                    context_budget=4000,
                )
                for script in scripts
            )
        )

    (first, sampler, _), (second, _, _) = asyncio.run(group())
    assert first.events == {"bad_json": 1}
    error = first.messages[2].tool_results[0].content
    assert error == "error: broken JSON at line 1 column 36: Expecting value"
    assert tokenizer.decode(sampler.requests[1][0]).endswith(f"<|result|>{error}<|agent|>")
    assert (first.status, first.passed, second.passed) == (RolloutStatus.FINISHED, True, True)
