"""GATS, GRAFT and piPPO keep more than a policy between steps: a teacher's queue and latch, a second policy, a critic;
VISTA's teacher is the policy before the update. A killed run loses none of it, and counts none of it twice."""

from pathlib import Path

import pytest

from gleaner.tasks.faults import fail_at
from tests.faults.conftest import Workplace, begin_warm

WORLD = Path(__file__).parent.parent / "flows/lottery.py"
LOTTERY = [
    "environment=python",
    f"environment.path={WORLD}:Lottery",
    "policy=tiny",
    "policy.hidden=32",
    "run.name=faulty",
    "run.steps=4",
    "run.seed=1",
    "run.prompts_per_step=8",
    "run.group_size=4",
    "run.checkpoint_every=2",
    "sampling.max_new_tokens=8",
    "warmstart.demonstrations=40",
    "warmstart.steps=10",
]
GATS = ["method.teacher.run=teacher", "method.teacher.success=0.29", "method.teacher.window=2"]
GRAFT = [
    "method.peer.policy={kind: tiny, hidden: 48, layers: 1, vocabulary: 300}",
    "method.peer.warmstart={demonstrations: 40, steps: 10}",
    "method.floor=0.0",
    "update.minibatches=2",
]
PIPPO = [
    "method.critic.lr=1e-3",
    "method.critic.minibatches=2",
    "method.critic.warmup_steps=1",
    "method.critic.reference_tokens=48",
    "method.critic.require_reading=false",
]
VISTA = [
    f"environment.path={WORLD.parent / 'peeking.py'}:Peeking",
    "environment.max_turns=3",
    "method.support=16",
    "method.experience.require_reading=false",
    "update.minibatches=2",
]


@pytest.fixture(scope="module")
def store(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a finished run that can teach, and with every start policy."""
    place = Workplace(tmp_path_factory.mktemp("methods"), LOTTERY)
    assert place.start("run.name=teacher", "run.steps=1", "run.seed=5") == 0, place.output
    assert place.start("run.name=starts", "run.steps=0", *GRAFT, method="graft") == 0, place.output
    return place.folder / ".gleaner"


def whole_run(store: Path, folder: Path, method: str, words: list[str]) -> Workplace:
    place = begin_warm(store, folder, [*LOTTERY, *words], without=())
    assert place.start(method=method) == 0, place.output
    return place


@pytest.fixture(scope="module")
def whole_gats(store, tmp_path_factory):
    place = whole_run(store, tmp_path_factory.mktemp("whole-gats"), "gats", GATS)
    weights = [entry["metrics"]["gats/lambda"] for _, entry in place.journal.entries()]
    assert weights[0] == 1.0
    assert 0.0 < weights[1] < 1.0, f"the kill in step 1 meets no queue: {weights}"
    assert weights[-1] == 0.0, f"the run never lets go, so the latch is not tried: {weights}"
    return place


@pytest.fixture(scope="module")
def whole_graft(store, tmp_path_factory):
    place = whole_run(store, tmp_path_factory.mktemp("whole-graft"), "graft", GRAFT)
    for name in ("graft/groups", "peer/graft/groups"):
        taken = [entry["metrics"][name] for _, entry in place.journal.entries()]
        assert sum(taken) > 0, f"{name} {taken}: nothing changed hands, so nothing of it is tried"
    return place


@pytest.fixture(scope="module")
def whole_pippo(store, tmp_path_factory):
    return whole_run(store, tmp_path_factory.mktemp("whole-pippo"), "pippo", PIPPO)


@pytest.fixture(scope="module")
def whole_vista(store, tmp_path_factory):
    return whole_run(store, tmp_path_factory.mktemp("whole-vista"), "vista", VISTA)


def assert_ends_alike(place, whole, place_of_death, method):
    assert place.start(fail_at=fail_at(*place_of_death), method=method) == -9, place.output
    assert place.start(method=method) == 0, place.output
    assert place.summary["version"] == whole.summary["version"]
    assert place.final_state() == whole.final_state()
    mine, theirs = ([entry for _, entry in p.journal.entries()] for p in (place, whole))
    for one, two in zip(mine, theirs, strict=True):
        assert one["method_state"] == two["method_state"]
        assert one["signal"] == two["signal"]
        assert one["rollouts"] == two["rollouts"]
        assert one.get("peer", {}).get("signal") == two.get("peer", {}).get("signal")


@pytest.mark.parametrize(
    "death",
    [
        ("update", 3, "after_optimizer"),
        pytest.param(("signal", 1, "before"), marks=pytest.mark.slow),
        pytest.param(("journal", 1, "before_append"), marks=pytest.mark.slow),
    ],
)
def test_a_killed_gats_run_keeps_its_queue_and_its_latch(store, whole_gats, tmp_path, death):
    place = begin_warm(store, tmp_path, [*LOTTERY, *GATS], without=())
    assert_ends_alike(place, whole_gats, death, "gats")
    budget, whole = place.summary["budget"], whole_gats.summary["budget"]
    assert budget["forward_tokens/teacher"] == whole["forward_tokens/teacher"] > 0


@pytest.mark.parametrize(
    "death",
    [
        ("update", 1, "after_optimizer"),
        pytest.param(("exchange", 1, "before"), marks=pytest.mark.slow),
        pytest.param(("journal", 2, "before_append"), marks=pytest.mark.slow),
    ],
)
def test_a_killed_graft_run_keeps_both_policies(store, whole_graft, tmp_path, death):
    place = begin_warm(store, tmp_path, [*LOTTERY, *GRAFT], without=())
    assert_ends_alike(place, whole_graft, death, "graft")
    for name in ("peer/rollouts", "rollouts", "forward_tokens/old", "peer/forward_tokens/old"):
        assert place.summary["budget"][name] == whole_graft.summary["budget"][name]
    states = [
        p.store.lookup(f"checkpoint-{p.journal.read(3)['peer']['version']}").objects["state"]
        for p in (place, whole_graft)
    ]
    assert states[0] == states[1]


@pytest.mark.parametrize(
    "death",
    [
        ("update", 1, "after_optimizer"),  # the policy has moved, and its critic has not
        pytest.param(
            ("update", 0, "after_optimizer"), marks=pytest.mark.slow
        ),  # the critic alone, in its warm-up
        pytest.param(("journal", 2, "before_append"), marks=pytest.mark.slow),
    ],
)
def test_a_killed_pippo_run_keeps_its_critic_and_both_optimizers(store, whole_pippo, tmp_path, death):
    place = begin_warm(store, tmp_path, [*LOTTERY, *PIPPO], without=())
    assert_ends_alike(place, whole_pippo, death, "pippo")
    assert place.summary["budget"] == whole_pippo.summary["budget"]
    states = [
        p.store.lookup(f"checkpoint-{p.journal.read(3)['method_state']['critic']}").objects["state"]
        for p in (place, whole_pippo)
    ]
    assert states[0] == states[1]


@pytest.mark.parametrize(
    "death",
    [
        ("update", 1, "after_optimizer"),
        pytest.param(("signal", 2, "before"), marks=pytest.mark.slow),
        pytest.param(("journal", 2, "before_append"), marks=pytest.mark.slow),
    ],
)
def test_a_killed_vista_run_gives_its_lessons_once(store, whole_vista, tmp_path, death):
    place = begin_warm(store, tmp_path, [*LOTTERY, *VISTA], without=())
    assert_ends_alike(place, whole_vista, death, "vista")
    assert place.summary["budget"] == whole_vista.summary["budget"]
    assert place.summary["budget"]["forward_tokens/experience"] > 0
