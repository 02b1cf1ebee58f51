"""GRPO on a world behind an OpenEnv server, through the flow that users start."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from gleaner.conf.compose import compose
from gleaner.flows.grpo import grpo
from gleaner.models import tables
from gleaner.tasks.context import RunContext

WORLD = Path(__file__).parents[1] / "models/environments/counting_world.py"


@pytest.fixture
def address():
    process = subprocess.Popen([sys.executable, str(WORLD), "plain", "4"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    process.kill()
    process.communicate()


def by_length(*, prompt, text, transcript, success):
    """A reward that differs from rollout to rollout: this policy never reaches the world's."""
    return len(text) % 7 / 7


@pytest.mark.slow
def test_a_step_learns_from_the_sessions_that_held_and_leaves_out_those_that_broke(
    prefect_api, address, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    settings = compose(
        [
            "environment=openenv", f"environment.base_url={address}", "environment.action_field=command",
            "environment.observation_field=screen.text", "environment.sessions=4", "environment.max_turns=2",
            "environment.reset={index: '{index}', wording: brittle}", "environment.train_prompts=6",
            "environment.validation_prompts=1", "environment.test_prompts=1",
            "policy=tiny", "warmstart=null", "policy.hidden=32", "policy.heads=2",
            "run.name=behind-a-server", "run.steps=1", "run.prompts_per_step=6", "run.group_size=4",
            "sampling.rows_per_shard=4", "sampling.max_new_tokens=5",
            f"rewards=[{{function: '{__file__}:by_length'}}]",
        ]
    )  # fmt: skip
    grpo(settings)
    context = RunContext.of(settings.run.name, settings)
    ((_, entry),) = context.journal.entries()
    rows = [s for ref in entry["rollouts"] for s in context.store.get_rows(tables.ROLLOUTS, ref)]
    verdicts = [v for ref in entry["verdicts"] for v in context.store.get_rows(tables.VERDICTS, ref)]
    index = {
        prompt.prompt_id: prompt.payload["reset"]["index"]
        for prompt in (context.environment.prompt("train", place) for place in range(6))
    }
    assert sorted(index.values()) == [2, 3, 4, 5, 6, 7]
    assert len(rows) == len(verdicts) == 24
    for row, verdict in zip(rows, verdicts, strict=True):
        odd = index[row.prompt_id] % 2 == 1
        assert (row.finish_reason == "error") == odd == ("a bug in the world" in str(row.environment_result))
        assert (verdict.status, verdict.success) == (("error", None) if odd else ("scored", False))
        assert (
            odd
            or row.transcript[1] == {"role": "user", "content": "You are at 0."}
            or row.transcript[1]["content"].startswith("Invalid action")
        )
    assert entry["metrics"]["update/tokens"] > 0
    assert math.isfinite(entry["metrics"]["update/ratio"])
