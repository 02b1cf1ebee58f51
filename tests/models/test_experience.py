"""What a rollout's siblings found, aligned to its decisions: scores by hand, and what may never enter."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gleaner.conf.errors import ContractError
from gleaner.conf.schema import ExperienceSettings, HouseholdEnvironment, TinyPolicy, WarmstartSettings
from gleaner.models.chat import Chat
from gleaner.models.environments.base import Finding
from gleaner.models.environments.household import Household
from gleaner.models.experience import (
    Aligned,
    Decision,
    Experience,
    align,
    coverage,
    experience_messages,
    experience_metrics,
    group_decisions,
    group_findings,
    shuffled,
    teacher_rows,
    turn_spans,
)
from gleaner.models.policy import build_tiny, train_tokenizer
from gleaner.models.records import Segment, Verdict
from gleaner.models.regions import Box, Cells, overlap
from gleaner.models.signal import group_rollouts
from gleaner.models.warmstart import demonstrations, informed

SETTINGS = ExperienceSettings()
WORLD = Household(HouseholdEnvironment(layout="fixed", receptacles=4, objects=3, max_turns=8), seed=0)


@pytest.fixture(scope="module")
def chat():
    return Chat(
        build_tiny(TinyPolicy(hidden=16, heads=2, layers=1), train_tokenizer(WORLD, 512)).tokenizer,
        multi_turn=True,
    )


def finding(turn, place, text="", rationale="look"):
    region = place if isinstance(place, Box) else Cells(frozenset([place]))
    return Finding(turn, rationale, rationale, region, text)


def experience(sample, turn, place, text="", success=False):
    return Experience(sample, finding(turn, place, text), success)


def places_of(entries):
    return [
        next(iter(e.experience.finding.region.names))
        for e in entries
        if isinstance(e.experience.finding.region, Cells)
    ]


# ---------------------------------------------------------------------------------------------------- regions


def test_the_overlap_of_boxes_is_their_intersection_over_their_union():
    assert overlap(Box("p", 0, 0, 10, 10), Box("p", 0, 0, 10, 10)) == 1.0
    assert overlap(Box("p", 0, 0, 10, 10), Box("p", 5, 0, 15, 10)) == pytest.approx(50 / 150)
    assert overlap(Box("p", 0, 0, 10, 10), Box("p", 10, 0, 20, 10)) == 0.0
    assert overlap(Box("p", 0, 0, 10, 10), Box("q", 0, 0, 10, 10)) == 0.0
    assert overlap(Box("p", 3, 3, 3, 3), Box("p", 3, 3, 3, 3)) == 0.0


def test_the_overlap_of_cells_is_the_share_that_both_have():
    assert overlap(Cells(frozenset("ab")), Cells(frozenset("bc"))) == pytest.approx(1 / 3)
    assert overlap(Cells(frozenset("a")), Box("p", 0, 0, 1, 1)) == 0.0


# -------------------------------------------------------------------------------------------------- alignment


def test_scores_by_hand():
    """w = (1, 1, 1, 0.25), 8 turns, decision 2; the question has four words, of which an entry has so many."""
    pool = [
        experience(1, 2, "shelf", "red mug here", success=True),  # 1 + 2/4 + 1 - 0
        experience(2, 6, "desk", "red thing", success=False),  # 0 + 1/4 + 1 - 0.25 * 4/8
    ]
    first, second = align(pool, 0, 2, [], "find the red mug", "", 8, SETTINGS)
    assert first.experience.sample == 1
    assert first.score == pytest.approx(2.5)
    assert second.score == pytest.approx(1.125)


def test_novelty_falls_with_the_overlap_of_what_was_seen_before():
    seen = [finding(0, Box("p", 0, 0, 10, 10))]
    near, far = (
        Experience(1, finding(1, Box("p", 5, 0, 15, 10)), False),
        Experience(2, finding(1, Box("p", 50, 0, 60, 10)), False),
    )
    entries = align([near, far], 0, 1, seen, "", "", 4, SETTINGS)
    assert [e.experience.sample for e in entries] == [2, 1]
    assert entries[0].score - entries[1].score == pytest.approx(1 / 3)


def test_what_the_attempt_saw_is_left_out_but_only_from_the_turn_after_it():
    pool = [experience(1, 0, "shelf")]
    own = [finding(2, "shelf")]
    assert align(pool, 0, 2, own, "", "", 8, SETTINGS)
    assert not align(pool, 0, 3, own, "", "", 8, SETTINGS)


def test_a_later_turn_of_a_sibling_may_help_an_early_one():
    assert align([experience(1, 7, "shelf")], 0, 0, [], "", "", 8, SETTINGS)


def test_entries_that_cover_the_same_are_told_once_and_counted():
    pool = [experience(1, 0, "shelf"), experience(2, 0, "shelf", success=True), experience(3, 0, "desk")]
    entries = align(pool, 0, 0, [], "", "", 8, SETTINGS)
    assert [(e.experience.sample, e.count) for e in entries] == [(2, 2), (3, 1)]


def test_findings_of_successes_alone_by_option():
    pool = [experience(1, 0, "shelf"), experience(2, 0, "desk", success=True)]
    entries = align(pool, 0, 0, [], "", "", 8, ExperienceSettings(source="successes"))
    assert places_of(entries) == ["desk"]


pools = st.lists(
    st.builds(
        experience,
        st.integers(0, 4),
        st.integers(0, 5),
        st.sampled_from("abcdef"),
        st.sampled_from(["", "mug", "red mug"]),
        st.booleans(),
    ),
    max_size=14,
)
owns = st.lists(st.builds(finding, st.integers(0, 5), st.sampled_from("abcdef")), max_size=4)


@given(pools, owns, st.integers(0, 4), st.integers(0, 5), st.randoms())
def test_alignment_is_never_of_the_attempt_itself_nor_of_what_it_saw_and_needs_no_order(
    pool, own, sample, turn, random
):
    # One rollout has one verdict, and a turn finds one thing.
    pool = list({(e.sample, e.finding.turn): replace(e, success=e.sample % 2 == 0) for e in pool}.values())
    entries = align(pool, sample, turn, own, "the red mug", "", 6, SETTINGS)
    assert len(entries) <= SETTINGS.entries
    seen = {next(iter(f.region.names)) for f in own if f.turn < turn}
    told = places_of(entries)
    assert len(set(told)) == len(told)
    assert not seen & set(told)
    assert all(e.experience.sample != sample for e in entries)
    scores = [e.score for e in entries]
    assert scores == sorted(scores, reverse=True)
    permuted = random.sample(pool, len(pool))
    assert align(permuted, sample, turn, own, "the red mug", "", 6, SETTINGS) == entries


def test_coverage_counts_different_regions_once():
    group = {0: [finding(0, "a"), finding(1, "a")], 1: [finding(0, "a"), finding(1, "b")], 2: []}
    assert coverage(group, 0.7) == (2, 1.0)


# ------------------------------------------------------------------------------------------- real episodes


def played(chat, prompt, sample, noise):
    """An expert's noisy episode as a rollout's segment, and its verdict."""
    shown = WORLD.demonstrate(prompt, (), noise, sample)
    ids, mask = [], []
    for index, message in enumerate(shown.turns):
        new = (
            chat.answer_ids(message["content"], True)
            if message["role"] == "assistant"
            else chat.observation_ids([message], after_stop=True)
        )
        ids += new
        mask += [int(message["role"] == "assistant")] * len(new)
        if index + 1 == len(shown.turns) and message["role"] == "assistant":
            # The turn loop writes down the last answer, which no turn reads.
            shown.turns.append({"role": "user", "content": "You put it away."})
            break
    return (
        Segment(
            prompt.prompt_id, sample, 0, chat.prompt_ids(prompt.messages), ids, mask, [-1.0] * sum(mask), "v",
            "d", 0, "environment", "", shown.turns, {}, [],
        ),
        Verdict(prompt.prompt_id, sample, "scored", shown.success, float(shown.success), {}, "1"),
    )  # fmt: skip


def played_groups(chat, prompts=3, size=4, noise=0.6):
    rows = [
        played(chat, WORLD.prompt("train", index), sample, noise)
        for index in range(prompts)
        for sample in range(size)
    ]
    return group_rollouts([s for s, _ in rows], [v for _, v in rows], "drop_group", 2)[0]


def decisions_of(groups, settings=SETTINGS, wanted=lambda episode, group: True):
    return [
        decision
        for group in groups
        for decision in group_decisions(group, group_findings(group, WORLD), "q", 8, settings, wanted)
    ]


def messages_of(prompts=3):
    return {WORLD.prompt("train", i).prompt_id: WORLD.prompt("train", i).messages for i in range(prompts)}


def test_findings_are_places_that_were_looked_at_and_never_the_last_turn():
    transcript = [
        {"role": "assistant", "content": "go to cabinet 1"},
        {"role": "user", "content": "cabinet 1 is closed."},
        {"role": "assistant", "content": "open cabinet 1"},
        {"role": "user", "content": "In cabinet 1: key, mug."},
        {"role": "assistant", "content": "take pan from cabinet 1"},
        {"role": "user", "content": "Nothing happens."},
        {"role": "assistant", "content": "put mug on desk 1"},
        {"role": "user", "content": "You put mug on desk 1."},
    ]
    (found,) = WORLD.findings(transcript)
    assert (found.turn, found.action, found.text) == (1, "open cabinet 1", "In cabinet 1: key, mug.")
    assert found.region == Cells(frozenset(["cabinet 1"]))


def test_the_teacher_reads_the_rollouts_own_tokens_after_a_prompt_with_experience(chat):
    groups = played_groups(chat)
    decisions = decisions_of(groups)
    rows, too_long = teacher_rows(decisions, messages_of(), chat, SETTINGS, 1024)
    assert too_long == 0
    informed_turns = {(d.key, d.turn) for d in decisions if d.entries}
    segments = {d.key: d.segment for d in decisions}
    read = {}
    for row in rows:
        segment = segments[row.key]
        assert row.sampled_ids == segment.sampled_ids[: len(row.sampled_ids)]
        assert row.context_ids != segment.context_ids
        assert len(row.tokens) == sum(row.loss_mask)
        read.setdefault(row.key, []).extend(row.tokens.tolist())
    for key, tokens in read.items():
        assert len(set(tokens)) == len(tokens)  # every token is read once
        spans = turn_spans(segments[key])
        told = sum(stop - start for turn, (start, stop) in enumerate(spans) if (key, turn) in informed_turns)
        assert len(tokens) == told
    # A row for each decision says the same: each one's history is a prefix of the next one's.
    alone = [row for d in decisions for row in teacher_rows([d], messages_of(), chat, SETTINGS, 1024)[0]]
    assert len(alone) > len(rows)
    joined = {(row.key, token): row for row in rows for token in row.tokens.tolist()}
    for row in alone:
        for token in row.tokens.tolist():
            whole = joined[row.key, token]
            assert whole.context_ids == row.context_ids
            assert whole.sampled_ids[: len(row.sampled_ids)] == row.sampled_ids


def test_a_decision_beyond_the_context_is_left_out_and_counted(chat):
    groups = played_groups(chat)
    decisions = [d for d in decisions_of(groups) if d.entries]
    rows, none = teacher_rows(decisions, messages_of(), chat, SETTINGS, 1024)
    longest = max(len(row.context_ids) + len(row.sampled_ids) for row in rows)
    fewer, too_long = teacher_rows(decisions, messages_of(), chat, SETTINGS, longest - 1)
    assert (none, too_long > 0) == (0, True)
    assert max(len(row.context_ids) + len(row.sampled_ids) for row in fewer) < longest


def test_the_entries_stand_in_the_prompt_and_name_how_their_attempt_ended(chat):
    entries = [
        Aligned(Experience(3, replace(finding(1, "a", "In a: mug."), action="open a"), True), 1.0),
        Aligned(Experience(2, replace(finding(4, "b", "On b: key."), action="go to b"), False), 0.5),
    ]
    (message,) = experience_messages([{"role": "user", "content": "Find it."}], entries, chat, 100)
    assert message["content"] == (
        "Find it.\n\nWhat other attempts at this task found:"
        "\n[succeeded, turn 2] open a: In a: mug.\n[failed, turn 5] go to b: On b: key.\nYour attempt:"
    )
    messages = [{"role": "user", "content": "Find it."}]
    assert experience_messages(messages, [], chat, 100) == messages


def test_images_of_findings_stand_beside_their_words(chat):
    seen = replace(finding(0, Box("p", 0, 0, 4, 4), "A crop."), images=("abc",), action="zoom")
    (message,) = experience_messages(
        [{"role": "user", "content": [{"type": "image", "digest": "page"}, {"type": "text", "text": "How many?"}]}],
        [Aligned(Experience(1, seen, False), 1.0)], chat, 100,
    )  # fmt: skip
    assert [part["digest"] for part in message["content"] if part["type"] == "image"] == ["page", "abc"]


def test_a_long_answer_is_cut(chat):
    seen = finding(0, "a", "mug " * 200)
    (message,) = experience_messages(
        [{"role": "user", "content": "q"}], [Aligned(Experience(1, seen, False), 1.0)], chat, 16
    )
    assert message["content"].count("mug") < 20
    assert "…" in message["content"]


def test_shuffled_experience_is_the_same_at_other_prompts(chat):
    decisions = decisions_of(played_groups(chat, prompts=4, size=4))
    swapped = shuffled(decisions)
    assert [d.key for d in swapped] == [d.key for d in decisions]
    assert sorted(map(repr, (d.entries for d in swapped))) == sorted(
        map(repr, (d.entries for d in decisions))
    )
    owners = {id(entry): d.key[0] for d in decisions for entry in d.entries}
    assert all(owners[id(entry)] != d.key[0] for d in swapped for entry in d.entries)


def test_what_only_the_judged_rollout_found_never_reaches_its_teacher(chat):
    """Intervention: whatever one rollout does and however it ends, its own teacher's contexts stay what they were at
    turn 0, when it has seen nothing."""
    prompt = WORLD.prompt("train", 0)
    others = [played(chat, prompt, sample, 0.6) for sample in range(1, 5)]
    contexts = set()
    for own in range(6):
        segment, verdict = played(chat, prompt, 100 + own, 0.9)
        rows = [(replace(segment, sample=0), replace(verdict, sample=0)), *others]
        groups = group_rollouts([s for s, _ in rows], [v for _, v in rows], "drop_group", 2)[0]
        first = next(d for d in decisions_of(groups) if d.key[1] == 0 and d.turn == 0)
        contexts.add(repr(first.entries))
    assert len(contexts) == 1


def test_turns_that_do_not_match_the_tokens_are_refused(chat):
    segment, _ = played(chat, WORLD.prompt("train", 0), 0, 0.0)
    with pytest.raises(ContractError, match="turns in its transcript"):
        turn_spans(replace(segment, transcript=segment.transcript[2:]))


def test_metrics_by_hand():
    a, b = experience(1, 0, "a", success=True), experience(2, 0, "b")
    segment = Segment("p", 0, 0, [1], [1], [1], [0.0], "v", "d", 0, "stop", "", [], {}, [])
    decisions = [
        Decision(segment, 0, (Aligned(a, 1.0), Aligned(b, 1.0))),
        Decision(segment, 1, (Aligned(b, 1.0),)),
        Decision(segment, 2, ()),
        Decision(segment, 3, ()),
    ]
    found = [{0: [finding(0, "c")], 1: [a.finding], 2: [b.finding, b.finding]}]
    assert experience_metrics(found, decisions, 0.7) == pytest.approx(
        {
            "experience/pool": 4, "experience/regions_group": 3, "experience/regions_rollout": 1,
            "experience/informed": 0.5, "experience/entries": 1.5, "experience/from_successes": 1 / 3,
        }
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------- warm starts


def test_an_expert_that_was_told_goes_straight_there():
    shorter = 0
    for index in range(20):
        prompt = WORLD.prompt("train", index)
        plain = WORLD.demonstrate(prompt, (), 0.0, 0)
        known = WORLD.findings(plain.turns)
        told = WORLD.demonstrate(prompt, known, 0.0, 0)
        assert plain.success
        assert told.success
        assert len(told.turns) <= len(plain.turns)
        shorter += len(told.turns) < len(plain.turns)
    assert shorter > 3


def test_false_news_do_not_lead_an_expert_astray():
    world = Household(HouseholdEnvironment(layout="fixed", receptacles=4, objects=3, max_turns=16), seed=0)
    for index in range(20):
        prompt = world.prompt("train", index)
        for said in (prompt.payload["object"], "nothing"):
            lies = [finding(0, place, f"In {place}: {said}.") for place in prompt.payload["contents"]]
            assert world.demonstrate(prompt, lies, 0.0, 0).success


def test_a_share_of_the_demonstrations_begins_with_experience(chat):
    settings = WarmstartSettings(demonstrations=60, informed=0.5)
    plain = demonstrations(WORLD, settings, 0)
    shown = informed(WORLD, plain, settings, chat, 0)
    told = [d for d in shown if "What other attempts" in d.prompt.messages[-1]["content"]]
    assert 15 < len(told) < 45
    assert [d.prompt.prompt_id for d in shown] == [d.prompt.prompt_id for d in plain]
    assert informed(WORLD, plain, settings.model_copy(update={"informed": 0.0}), chat, 0) is plain
    assert informed(WORLD, plain, settings, chat, 0) == shown
