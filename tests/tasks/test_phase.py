"""Phases: Prefect tasks by default, plain calls inside a block, and retried by kind of error."""

import pytest
from prefect import flow

from gleaner.conf.errors import ConfigurationError, TransientError, VerifierContractError
from gleaner.tasks.faults import fail_at
from gleaner.tasks.keys import cache_key
from gleaner.tasks.phase import Made, inline_phases, phase

calls: list[str] = []


@phase(retries=1)
def double(number: int, hit: bool) -> Made[dict[str, int]]:
    """Twice a number."""
    calls.append("double")
    return Made({"twice": 2 * number}, hit)


def failing(error: Exception):
    @phase(retries=1)
    def fail() -> Made[int]:
        calls.append("fail")
        raise error

    @flow(persist_result=False)
    def run() -> None:
        fail()

    return run


@pytest.fixture(autouse=True)
def count_from_zero() -> None:
    calls.clear()


def test_a_record_is_handed_on_whether_it_was_made_or_found(prefect_api):
    @flow(persist_result=False)
    def run():
        return [double(2, hit=False), double(3, hit=True)]

    assert run() == [{"twice": 4}, {"twice": 6}]


def test_inside_a_block_a_phase_is_a_plain_call():
    with inline_phases():  # outside of any flow: a Prefect task would need one, or an API
        assert double(5, hit=False) == {"twice": 10}


@pytest.mark.parametrize("error", [ConfigurationError("x"), VerifierContractError("x"), ValueError("x")])
def test_what_would_fail_again_is_not_tried_again(prefect_api, error):
    with pytest.raises(type(error)):
        failing(error)()
    assert calls == ["fail"]


@pytest.mark.parametrize("error", [TransientError("x"), ConnectionResetError("x"), TimeoutError("x")])
def test_what_may_pass_is_tried_again(prefect_api, error):
    with pytest.raises(type(error)):
        failing(error)()
    assert calls == ["fail", "fail"]


def test_a_key_that_cannot_be_computed_fails_the_task(prefect_api):
    @phase(retries=0)
    def keyed() -> Made[str]:
        return Made(cache_key("rollouts", "code", sampling={"stop": {1, 2}}), hit=False)

    @flow(persist_result=False)
    def run() -> None:
        keyed()

    with pytest.raises(ConfigurationError, match="sampling"):
        run()


def test_a_fault_point_that_does_not_exist_is_refused():
    with pytest.raises(ConfigurationError, match="update:before_optimizer"):
        fail_at("update", 1, "somewhere")
