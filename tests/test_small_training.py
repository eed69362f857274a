"""The quality bench's questions, the small models' vocabulary and their training: data, masks, one step, export."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.quality import arithmetic, gathering, retrieval, stories
from benchmarks.quality.evaluation import ANSWER_ROOM, evaluation_set, gen_length, seen_in_training
from benchmarks.quality.items import LONG_TASKS, TASKS, Item
from benchmarks.quality.scoring import score, summary
from benchmarks.quality.split import HELD_OUT_SHARE, held_out
from benchmarks.quality.vocabulary import (
    EOS,
    FEMALE,
    KINDS,
    MASK,
    NAMES,
    SPECIAL,
    WORDS,
    vocabulary,
)
from mosaic.errors import CheckpointError, UnknownName, UsageError
from mosaic.models import load

torch = pytest.importorskip("torch")
EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "train_small"
MODULES = ("model", "attention", "data", "decode", "tokenizer_files", "checkpoint", "optimizer", "train")


@pytest.fixture(scope="module")
def small() -> Iterator[SimpleNamespace]:
    """The example's modules, imported from its folder and forgotten afterwards."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in MODULES:
            del sys.modules[name]


# --- vocabulary -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(small: SimpleNamespace) -> Any:
    return pytest.importorskip("tokenizers").Tokenizer.from_str(small.tokenizer_files.tokenizer_json())


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
@settings(max_examples=100, deadline=None)
def test_any_text_encodes_as_in_tokenizer_json_and_comes_back(tokenizer: Any, text: str) -> None:
    ids = vocabulary().encode(text)
    assert tokenizer.encode(text).ids == ids
    assert vocabulary().decode(ids) == text == tokenizer.decode(ids, skip_special_tokens=False)


def test_conversations_encode_as_in_tokenizer_json(tokenizer: Any) -> None:
    for item in evaluation_set(lengths=(256,), per_task=3):
        text = item.prompt + item.answer + "[EOS][MASK][PAD]"
        assert tokenizer.encode(text).ids == vocabulary().encode(text)
        assert tokenizer.decode(vocabulary().encode(text), skip_special_tokens=False) == text


def test_the_vocabulary_is_small_and_its_ids_stay(small: SimpleNamespace) -> None:
    """A trained checkpoint depends on every id: a change here needs new checkpoints."""
    assert len(vocabulary()) == 577
    assert len(small.tokenizer_files.tokenizer_json().encode()) < 100_000
    assert [vocabulary().encode(text) for text in SPECIAL] == [[index] for index in range(len(SPECIAL))]
    for name in NAMES:
        assert len(vocabulary().encode(f" {name}")) == 1
    assert len(vocabulary().encode("0123456789")) == 10
    assert vocabulary().decode([EOS, 261, MASK], skip_special=True) == WORDS[0]


def test_every_word_of_the_vocabulary_is_trained() -> None:
    rng, seen = Random(0), set[int]()
    for _ in range(3000):
        story = stories.draw(rng, evaluation=False)
        facts = retrieval.draw_facts(rng, 6, retrieval.for_training)
        text = "".join(fact.sentence for fact in facts) + retrieval.filler(rng) + story.question + story.answer
        text += (
            retrieval.ask(*facts[:2]).question + arithmetic.draw(rng, "sorting", evaluation=False).question + " Answer"
        )
        seen.update(vocabulary().encode(text))
    assert [word for word in WORDS if vocabulary().word(word) not in seen] == []


def test_the_chat_template_writes_the_prompts_of_the_bench(small: SimpleNamespace) -> None:
    jinja2 = pytest.importorskip("jinja2")
    template = jinja2.Environment().from_string(small.tokenizer_files.CHAT_TEMPLATE)
    item = evaluation_set(tasks=("addition",), per_task=1)[0]
    question = item.prompt.removeprefix("<|user|> ").removesuffix("<|assistant|>")
    messages = [{"role": "user", "content": question}]
    assert template.render(messages=messages, add_generation_prompt=True) == item.prompt


# --- questions and answers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", arithmetic.OPERATIONS)
def test_working_and_results_are_right(operation: str) -> None:
    rng = Random(1)
    for _ in range(300):
        turn = arithmetic.draw(rng, operation, evaluation=bool(rng.random() < 0.1))
        numbers = [int(word) for word in re.findall(r"\d+", turn.question)]
        working = turn.answer.partition(" Answer:")[0]
        if operation == "sorting":
            assert turn.result == " ".join(map(str, sorted(numbers)))
            for level in re.findall(r"[^.]+", working):
                assert sorted(map(int, re.findall(r"\d+", level))) == sorted(numbers)
                assert all(part == sorted(part) for part in ([*map(int, p.split())] for p in level.split(",")))
            continue
        expected = {"addition": sum(numbers), "subtraction": numbers[0] - numbers[1]}
        assert int(turn.result) == expected.get(operation, numbers[0] * numbers[1])
        steps = re.findall(r"([\d+*-]+)=(\d+)", working)
        assert steps and all(eval(left) == int(right) for left, right in steps)
        digits = [int(right) % 10 for _, right in steps]
        last = int(steps[-1][1]) // 10
        assert int("".join(map(str, [last, *reversed(digits)]))) == int(turn.result)


def test_stories_keep_their_own_rules_and_others_do_not() -> None:
    rng = Random(2)
    for _ in range(300):
        turn = stories.draw(rng, evaluation=False)
        assert stories.faults(turn.question, turn.answer) == []
    hero = turn.question.split()[4].strip(",")
    other = next(name for name in NAMES if name != hero and (name in FEMALE) != (hero in FEMALE))
    he, his = stories.pronoun(hero)
    she, her = stories.pronoun(other)
    sentences = turn.answer.split(". ")
    broken = {
        "name": turn.answer.replace(hero, other, 1),
        "pronoun": re.sub(rf"\b{he}\b", she, re.sub(rf"\b{his}\b", her, turn.answer)),
        "missing": ". ".join(sentences[:-1]) + ".",
        "order": ". ".join([sentences[1], sentences[0], *sentences[2:]]),
        "cut": turn.answer[:-1],
        "empty": "",
    }
    for name, text in broken.items():
        assert stories.faults(turn.question, text), name


def test_a_document_states_every_fact_once_at_its_place() -> None:
    rng = Random(3)
    for size in (64, 300, 2000):
        facts = retrieval.draw_facts(rng, size // 25, retrieval.for_training)
        for depth in (None, 0.0, 0.5, 1.0):
            made = retrieval.document(rng, facts, size, depth=depth)
            assert size - 20 <= len(made.ids) <= size
            text = vocabulary().decode(made.ids)
            assert all(text.count(fact.sentence) == 1 for fact in facts)
            for fact, start in zip(made.facts, made.starts, strict=True):
                assert vocabulary().decode(made.ids[start:]).startswith(fact.sentence)
            if depth is not None:
                assert abs(made.starts[0] / len(made.ids) - depth) < 25 / size
    with pytest.raises(ValueError, match="facts take"):
        retrieval.document(rng, facts, 20)


def test_distractors_share_name_attribute_and_digits() -> None:
    facts = retrieval.draw_facts(Random(4), 100, retrieval.for_training)
    assert len({(fact.attribute, fact.name) for fact in facts}) == 100
    names, attributes = [fact.name for fact in facts], [fact.attribute for fact in facts]
    assert sum(names.count(name) > 1 for name in names) > 50
    assert sum(attributes.count(attribute) > 1 for attribute in attributes) > 90
    codes = [fact.value for fact in facts if len(fact.value) == 4 and fact.value.isdigit()]
    near = [a for a in codes if any(sum(x != y for x, y in zip(a, b, strict=True)) == 1 for b in codes)]
    assert len(near) > len(codes) / 8


def solved(text: str) -> list[tuple[str, str, str]]:
    """(task, answer found by reading the text alone, answer given) of every question with a long answer in it."""
    numbered = {match[:3]: match[3] for match in re.findall(r"The (\w+) (\d+) of (\w+) is (\d{4})\.", text)}
    friends = re.findall(r"The friend of (\w+) is (\w+)\.", text)
    assert len(dict(friends)) == len(friends)
    passages = re.findall(r' The story about (\w+):"([^"]*)"', text)
    assert len(dict(passages)) == len(passages)
    document = text.partition("<|assistant|>")[0].rpartition(" Sort all ")[0]
    counts = Counter(re.findall(r"\w+", document))
    found = []
    for question, answer in re.findall(r"( (?:Write|Sort) [^.]*\.)<\|assistant\|>(.*?)(?:\[EOS\]|$)", text):
        if match := re.fullmatch(r" Write the (\w+) of (\w+), (\d+) to (\d+)\.", question):
            attribute, name, first, last = match.groups()
            parts = [f"{n} {numbered[attribute, str(n), name]}" for n in range(int(first), int(last) + 1)]
            found.append(("listing", " " + ", ".join(parts), answer))
        elif match := re.fullmatch(r" Write the friend of (\w+), the .* on to (\w+)\.", question):
            walked, links = [match[1]], dict(friends)
            while walked[-1] != match[2]:
                walked.append(links[walked[-1]])
            found.append(("chain", " " + ", ".join(walked[1:]), answer))
        elif match := re.fullmatch(r" Write the story about (\w+)\.", question):
            found.append(("passage", dict(passages)[match[1]], answer))
        elif match := re.fullmatch(r" Sort all (.*)\.", question):
            parts = []
            for kind in match[1].split(", "):
                order = sorted(KINDS[kind], key=lambda word: -counts[word])
                falling = [counts[word] for word in order[:7]]
                assert all(a > b for a, b in pairwise(falling))  # no ties
                parts.append(f" {kind} {', '.join(order[:6])}.")
            found.append(("frequent", "".join(parts), answer))
    return found


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2))])
def test_long_answers_are_what_their_documents_say(small: SimpleNamespace, seed: int) -> None:
    """In evaluation and in training rows, by a reader of its own."""
    items = evaluation_set(seed, tasks=LONG_TASKS, lengths=(1024, 1500 + seed))
    assert seen_in_training(items) == []
    for item in items:
        assert solved(item.prompt + item.answer) == [(item.task, item.answer, item.answer)]
        assert 63 <= len(vocabulary().encode(item.answer)) < gen_length(item.task) <= 256
        assert item.length - gen_length(item.task) - 25 < item.tokens <= item.length - gen_length(item.task)
        assert set(item.keys) <= set(keys_in(item.prompt + item.answer))
    depths = [item.depth for item in items if item.task != "frequent" and item.length == 1024]
    off = np.abs(np.array(depths).reshape(3, 10) - (np.arange(10) + 0.5) / 10)
    assert np.median(off) < 0.05 and off.max() < 0.05 + 230 / 700  # no other piece is cut for it
    rng, seen = Random(seed), Counter[str]()
    for length in (256, 512, 1024, 2048):
        for _ in range(8 if length == 2048 else 24):
            ids, spans = small.data.row(rng, length, 0.0, 1.0)
            text = vocabulary().decode(ids)
            assert len(ids) == length == spans[-1][2] and not [key for key in keys_in(text) if held_out(*key)]
            answers = {vocabulary().decode(ids[start : middle - 1]) for start, middle, _ in spans}
            for task, expected, answer in solved(text):
                assert expected == answer and answer in answers
                seen[task] += 1
    assert set(seen) == set(LONG_TASKS) and min(seen.values()) > 10


def test_sources_of_a_document_fit_and_do_not_contradict_each_other() -> None:
    def length(text: str) -> int:
        return len(vocabulary().encode(text))

    rng = Random(5)
    for _ in range(60):
        room = rng.randint(0, 6000)
        first = gathering.draw_sources(rng, room // 2, length)
        sources = first + gathering.draw_sources(rng, room // 2, length, first)
        assert sum(length(piece) for source in sources for piece in source.pieces) <= room
        series = [(s.attribute, s.name) for s in sources if isinstance(s, gathering.Series)]
        names = [name for s in sources if isinstance(s, gathering.Chain) for name in s.names]
        titles = [s.name for s in sources if isinstance(s, gathering.Passage)]
        assert all(len(set(found)) == len(found) for found in (series, names, titles))
    with pytest.raises(ValueError, match="no chain of 5 links over 4 names"):
        gathering.draw_chain(rng, NAMES[:4], 5, evaluation=False)


# --- evaluation, apart from training ----------------------------------------------------------------------------------


def keys_in(text: str) -> list[tuple[str | int, ...]]:
    """The statements and questions of a text, parsed from its words alone."""
    found: list[tuple[str | int, ...]] = []
    names = "|".join(NAMES)
    found += [match.groups() for match in re.finditer(rf"The (\w+) of ({names}) is (\w+)\.", text)]
    found += re.findall(rf"The (\w+) \d+ of ({names}) is (\w+)\.", text)
    found += [("passage", *match) for match in re.findall(rf' The story about ({names}):"([^"]*)"', text)]
    ranked = re.findall(rf" ({'|'.join(KINDS)}) (\w+(?:, \w+){{5}})\.", text)
    found += [("frequent", kind, *words.split(", ")) for kind, words in ranked]
    for a, sign, b in re.findall(r"What is (\d+) ([+*-]) (\d+)\?", text):
        pair = sorted((int(a), int(b))) if sign == "+" else [int(a), int(b)]
        found.append((sign, *pair))
    found += [("sort", *map(int, values.split())) for values in re.findall(r"Sort ([\d ]+)\.", text)]
    asked = re.finditer(r"Write a story about (\w+), an? (\w+) (\w+) and the (\w+)\.", text)
    return found + [("story", *match.groups()) for match in asked]


def test_the_split_keeps_its_share_for_evaluation() -> None:
    share = sum(held_out("code", name, value) for name in NAMES for value in range(1000)) / (96 * 1000)
    assert abs(share - HELD_OUT_SHARE) < 0.005


def test_no_evaluation_item_occurs_in_the_training_stream(small: SimpleNamespace) -> None:
    stages = (*small.train.STAGES, *small.train.CONTINUED, *small.train.LAST)
    keys: list[tuple[str | int, ...]] = []
    prompts = set()
    for index, stage in enumerate(stages):
        for number in range(2):
            batch = small.data.make_batch(0, index, number, stage, 16_384, 32 * number)
            for row in batch.tokens.tolist():
                text = vocabulary().decode(row)
                keys += keys_in(text)
                prompts.update(re.findall(r"<\|user\|>.*?<\|assistant\|>", text))
    assert len(keys) > 1000
    kinds = {"+", "-", "*", "sort", "story", "code", "pet", "friend", "passage", "frequent"}
    assert {str(key[0]) for key in keys} >= kinds
    assert not [key for key in keys if held_out(*key)]
    items = evaluation_set(lengths=(256, 512), per_task=20)
    assert seen_in_training(items) == []
    assert not {item.prompt for item in items} & prompts
    for item in items:  # the reader above finds what is asked, so it would have found it in the stream
        assert set(item.keys) <= set(keys_in(item.prompt))


def test_an_item_of_the_training_side_is_found() -> None:
    item = evaluation_set(tasks=("addition",), per_task=1)[0]
    turn = arithmetic.draw(Random(0), "addition", evaluation=False)
    wrong = Item(task=item.task, prompt=item.prompt, answer=item.answer, tokens=item.tokens, keys=turn.keys)
    assert seen_in_training([item, wrong]) == [wrong]


def test_evaluation_sets_repeat_and_have_one_answer_at_the_depth_they_say() -> None:
    items = evaluation_set(3, lengths=(256, 1024), per_task=2)
    assert items == evaluation_set(3, lengths=(256, 1024), per_task=2)
    assert items != evaluation_set(4, lengths=(256, 1024), per_task=2)
    assert {item.task for item in items} == set(TASKS)
    for item in items:
        assert item.tokens == len(vocabulary().encode(item.prompt))
        assert len(vocabulary().encode(item.answer)) < gen_length(item.task)
        if item.length:
            assert item.length - 60 < item.tokens <= item.length - ANSWER_ROOM
            for attribute, name, value in item.keys:
                assert item.prompt.count(f"The {attribute} of {name} is") == 1
                assert str(value) in item.result
    depths = [item.depth for item in items if item.task == "retrieval" and item.length == 1024]
    assert [int(depth * 10) for depth in depths] == list(range(10))


def test_evaluation_sets_refuse_what_cannot_be() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'sorting'"):
        evaluation_set(tasks=("sortin",))
    with pytest.raises(UsageError, match="at least 128 tokens, got 64"):
        evaluation_set(lengths=(64,))
    with pytest.raises(UsageError, match="at least one item"):
        evaluation_set(per_task=0)
    with pytest.raises(UsageError, match=r"passage, frequent has at least 1,024 tokens, got 512"):
        evaluation_set(tasks=("retrieval", "chain"), lengths=(512, 2048))


def test_scores_want_the_result_and_nothing_else() -> None:
    items = {item.task: item for item in evaluation_set(lengths=(256,), per_task=1)}
    for item in items.values():
        right = score(item, item.answer)
        assert right.exact and right.whole, right
        assert not score(item, "").exact
        assert not score(item, item.answer[:-1]).exact
    addition, single = items["addition"], items["retrieval"]
    assert score(addition, f" 1+1=2. Answer: {addition.result} ").exact
    assert not score(addition, f" 1+1=2. Answer: {addition.result} ").whole
    assert not score(addition, f" {addition.result}").exact
    assert not score(single, f" The answer is {single.result}").exact
    chain = evaluation_set(tasks=("chain",), lengths=(1024,))[0]
    names = chain.answer.split(",")
    half = score(chain, ",".join(names[: len(names) // 2]))
    assert not half.exact and half.tokens == pytest.approx((2 * (len(names) // 2) - 1) / (2 * len(names)))
    assert score(chain, ",".join([" Zoe", *names[1:]])).tokens < 0.2  # shifted by the bytes of an unknown word
    assert score(chain, chain.answer).tokens == 1.0
    beyond = score(chain, chain.answer + ", Anna")  # the name asked for was reached
    assert beyond.exact and not beyond.whole and not score(chain, chain.answer + "Anna").exact
    listing = evaluation_set(tasks=("listing",), lengths=(1024,))[0]
    assert score(listing, listing.answer).exact and not score(listing, listing.answer + ", 99 1234").exact
    found = summary([score(single, single.answer), score(single, "no")])
    assert found["by_task"]["retrieval"] == {"exact": 0.5, "whole": 0.5, "tokens": 0.5, "count": 2}
    assert list(found["by_length"]["retrieval"]) == ["256"]


# --- training data ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [64, 128, 256, 1024])
def test_rows_are_conversations_of_exactly_their_length(small: SimpleNamespace, length: int) -> None:
    rng, kinds = Random(length), set()
    for _ in range(200):
        ids, spans = small.data.row(rng, length, 0.5 if length >= 128 else 0.0)
        assert len(ids) == length and MASK not in ids
        for start, middle, end in spans:
            assert ids[start - 1] == vocabulary().encode("<|assistant|>")[0]
            assert ids[middle - 1] == EOS and EOS not in ids[start : middle - 1]
            assert set(ids[middle:end]) <= {EOS}
        assert spans[-1][2] == length
        text = vocabulary().decode(ids)
        for attribute, name in re.findall(r"What is the (\w+) of (\w+)\?", text):
            stated = re.findall(rf"The {attribute} of {name} is (\w+)\.", text)
            assert len(stated) == 1
            assert f"What is the {attribute} of {name}?<|assistant|> {stated[0]}[EOS]" in text
            kinds.add("retrieval")
        kinds |= {"other" for key in keys_in(text) if key[0] in ("+", "-", "*", "sort", "story")}
    assert kinds == ({"retrieval", "other"} if length >= 128 else {"retrieval"})


def test_batches_repeat_whoever_makes_them(small: SimpleNamespace) -> None:
    stages = small.train.TOY_STAGES
    expected = [small.data.make_batch(5, 0, index, stages[0], 1024, 0) for index in range(6)]
    other = small.data.make_batch(6, 0, 0, stages[0], 1024, 0)
    assert not np.array_equal(other.tokens, expected[0].tokens)
    loader = small.data.Loader(5, stages, 1024, 0, workers=2)
    try:
        for batch in expected:
            made = loader.next(0)
            np.testing.assert_array_equal(made.tokens, batch.tokens)
            np.testing.assert_array_equal(made.weights, batch.weights)
        second = loader.next(1)
        np.testing.assert_array_equal(second.tokens, small.data.make_batch(5, 1, 0, stages[1], 1024, 0).tokens)
    finally:
        loader.close()


def test_weights_are_unbiased_and_stay_on_answers(small: SimpleNamespace) -> None:
    """The mean weight of a token is its worth, whatever the ratio of masks: LLaDA's 1/t."""
    spans, noise = [[(10, 20, 30), (40, 44, 44)]] * 20_000, np.random.default_rng(0)
    weights = small.data.weigh(spans, 64, [False] * len(spans), 0, noise)
    answers = np.zeros(64, bool)
    answers[10:30] = answers[40:44] = True
    assert not weights[:, ~answers].any()
    mean = weights.mean(0)
    assert np.abs(mean[10:20] - 1).max() < 0.05 and np.abs(mean[40:44] - 1).max() < 0.05
    assert np.abs(mean[20:30] - small.data.TAIL_WEIGHT).max() < 0.005
    whole = (weights[:, 10:20] > 0).all(1).mean()
    assert 0.35 < whole < 0.5  # decoding starts there


def test_whole_rows_and_blocks_have_ratios_of_their_own(small: SimpleNamespace) -> None:
    spans, noise = [[(20, 60, 64)]] * 4000, np.random.default_rng(1)
    weights = small.data.weigh(spans, 64, [False] * len(spans), 32, noise)
    full = (weights[:, 20:32] > 0).all(1), (weights[:, 32:60] > 0).all(1)
    both = (full[0] & full[1]).mean()
    assert abs(both - full[0].mean() * full[1].mean()) < 0.03  # independent blocks
    some = small.data.weigh(spans, 64, [index % 2 == 0 for index in range(len(spans))], 32, noise)
    assert (some[::2, :20] > 0).mean() > 0.1 and not some[1::2, :20].any()


# --- attention of block diffusion -------------------------------------------------------------------------------------


def sees(length: int, block: int, query: int, key: int) -> bool:
    """The rule in words: [noisy | clean]."""
    query_clean, key_clean = query >= length, key >= length
    query_block, key_block = query % length // block, key % length // block
    if query_clean:
        return key_clean and key_block <= query_block
    return key_block < query_block if key_clean else key_block == query_block


@pytest.mark.parametrize(("length", "block"), [(8, 2), (12, 4), (64, 32)])
def test_the_doubled_mask_says_who_sees_whom(small: SimpleNamespace, length: int, block: int) -> None:
    mask = small.attention.doubled_mask(length, block)
    expected = [[sees(length, block, query, key) for key in range(2 * length)] for query in range(2 * length)]
    assert mask.tolist() == expected


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.soak
def test_flex_attention_sees_the_same(small: SimpleNamespace) -> None:
    """Tiles and rule against the mask, with several row lengths of one object in turn."""
    tokens, generator = 256, torch.Generator().manual_seed(0)
    diffusion = small.attention.BlockDiffusion(tokens, 32, torch.device("cpu"), compiled=False)
    q, k, v = (torch.randn(2 * tokens, heads, 16, generator=generator) for heads in (4, 2, 2))
    for length in (128, 256, 128):
        mask = small.attention.doubled_mask(length, 32)
        expected = small.attention.masked(tokens // length, mask)(q, k, v)
        assert (diffusion.rows_of(length)(q, k, v) - expected).abs().max() < 1e-5
        tiles = diffusion.prepared[length][3]
        whole = torch.block_diag(*[mask] * (tokens // length)).view(4, 128, 4, 128)
        assert torch.equal(tiles.to_dense()[0, 0].bool(), whole.any(3).any(1))
        for row in range(4):
            count = int(tiles.full_kv_num_blocks[0, 0, row])
            full = set(tiles.full_kv_indices[0, 0, row, :count].tolist())
            assert full == set(whole.all(3).all(1)[row].nonzero()[:, 0].tolist())


def test_a_doubled_row_trains_every_block_as_it_is_decoded(small: SimpleNamespace) -> None:
    """Hidden states of each noisy block equal those of a plain block-causal pass over the clean past and that block."""
    torch.manual_seed(0)
    sizes = small.model.SIZES["sdar"].toy()
    model = small.model.Transformer(sizes)
    length, block = 96, sizes.block
    clean = torch.randint(5, sizes.vocabulary, (length,))
    noisy = torch.where(torch.rand(length) < 0.5, MASK, clean)
    position = torch.arange(length)
    with torch.no_grad():
        tables = small.model.rotary_tables(sizes, position.repeat(2))
        attend = small.attention.masked(1, small.attention.doubled_mask(length, block))
        doubled = model.hidden(torch.cat([noisy, clean]), *tables, attend, torch.float32)[:length]
        for start in range(0, length, block):
            end = start + block
            canvas = torch.cat([clean[:start], noisy[start:end]])
            visible = position[:end, None] // block >= position[:end] // block
            tables = small.model.rotary_tables(sizes, position[:end])
            alone = model.hidden(canvas, *tables, small.attention.masked(1, visible), torch.float32)[start:]
            assert (doubled[start:end] - alone).abs().max() < 1e-4


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("family", [pytest.param("llada", marks=pytest.mark.soak), "sdar"])
@pytest.mark.parametrize("optimizer", ["muon", pytest.param("adamw", marks=pytest.mark.soak)])
def test_steps_lower_the_loss(
    small: SimpleNamespace, tmp_path: Path, family: str, optimizer: str, one_thread: None
) -> None:
    asked = small.train.Settings(family=family, out=tmp_path, tokens=512, toy=True, optimizer=optimizer)
    trainer = small.train.Trainer(asked, torch.device("cpu"))
    stage = small.data.Stage(share=1.0, lengths={64: 1.0}, tasks={}, whole=0.2)
    batch = small.data.make_batch(0, 0, 0, stage, 512, small.model.SIZES[family].block)
    losses = [float(trainer.step(batch, 3e-3)) for _ in range(12)]
    assert all(np.isfinite(losses)) and losses[-1] < 0.75 * losses[0]


@pytest.mark.soak
def test_a_training_goes_on_from_a_checkpoint(
    small: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """From its very weights, on the tasks with long answers, at a lower rate."""
    torch.manual_seed(3)
    first = small.model.Transformer(small.model.SIZES["sdar"].toy())
    small.checkpoint.save(first, tmp_path / "first")
    asked = small.train.Settings(
        family="sdar", out=tmp_path, tokens=512, toy=True, start=tmp_path / "first", optimizer="adamw"
    )
    trainer = small.train.Trainer(asked, torch.device("cpu"))
    for name, tensor in small.checkpoint.named_tensors(first).items():
        assert torch.equal(small.checkpoint.named_tensors(trainer.model)[name], tensor)
    monkeypatch.setattr(small.train, "LOG_EVERY", 2)
    monkeypatch.setattr(small.train, "small_sets", lambda *_: evaluation_set(tasks=("addition",), per_task=1))
    small.train.main(
        ["--family", "sdar", "--toy", "--out", str(tmp_path / "on"), "--from", str(tmp_path / "first"), "--seconds", "3",
         "--reserve", "1", "--tokens", "512", "--workers", "1"]
    )  # fmt: skip
    curves = json.loads((tmp_path / "on" / "curves.json").read_text())
    assert curves["peak_learning_rate"] == small.train.RATES["long"] < small.train.RATES["first"]
    assert curves["stages"][0]["long"] and curves["from"] == str(tmp_path / "first")
    with pytest.raises(SystemExit, match="not those of a llada"):
        small.checkpoint.restore(small.model.Transformer(small.model.SIZES["llada"].toy()), tmp_path / "first")


def test_orthogonal_pushes_singular_values_to_one(small: SimpleNamespace) -> None:
    torch.manual_seed(0)
    for shape in ((2, 48, 16), (3, 16, 48), (1, 20, 20)):
        values = torch.linalg.svdvals(small.optimizer.orthogonal(torch.randn(shape)))
        assert float(values.max()) < 1.4 and float(values.median()) > 0.6


@pytest.mark.parametrize("family", [pytest.param("llada", marks=pytest.mark.soak), "sdar"])
def test_decoding_fills_every_answer(small: SimpleNamespace, family: str, one_thread: None) -> None:
    torch.manual_seed(0)
    model = small.model.Transformer(small.model.SIZES[family].toy())
    prompts = [vocabulary().encode(text) for text in ("<|user|> What is 1 + 2?<|assistant|>", "<|user|><|assistant|>")]
    answers = small.decode.decode(model, prompts, 32, dtype=torch.float32)
    assert answers == small.decode.decode(model, prompts, 32, dtype=torch.float32)
    alone = [small.decode.decode(model, [prompt], 32, dtype=torch.float32)[0] for prompt in prompts]
    assert answers == alone
    for answer in answers:
        assert EOS not in answer and not {0, MASK} & set(answer)


@pytest.mark.parametrize("family", ["llada", "sdar"])
def test_checkpoints_have_the_layout_of_their_family(small: SimpleNamespace, tmp_path: Path, family: str) -> None:
    pytest.importorskip("tokenizers")
    from mosaic.models import load

    torch.manual_seed(0)
    sizes = small.model.SIZES[family]
    model = small.model.Transformer(sizes)
    small.checkpoint.save(model, tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 11.9 * 2**20
    architecture = load(str(tmp_path)).architecture
    assert (architecture.hidden, architecture.layers, architecture.attention.kv_heads) == (256, 6, sizes.kv_heads)
    assert (architecture.mask_token_id, architecture.vocabulary) == (MASK, 640)
    assert architecture.max_positions >= 8192
    tensors = small.checkpoint.named_tensors(model)
    assert sum(tensor.numel() for tensor in tensors.values()) == model.num_parameters


def test_a_saved_llada_predicts_what_the_training_code_predicts(small: SimpleNamespace, tmp_path: Path) -> None:
    """Through Mosaic's own step, in float32 of the same bfloat16 weights."""
    pytest.importorskip("safetensors")
    import mosaic

    torch.manual_seed(0)
    model = small.model.Transformer(small.model.SIZES["llada"])
    small.checkpoint.save(model, tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    tokens = torch.randint(5, 577, (50,))
    tokens[10:20] = MASK
    tables = small.model.rotary_tables(model.sizes, torch.arange(50))
    with torch.no_grad():
        hidden = model.hidden(tokens, *tables, small.attention.bidirectional(1), torch.float32)
        confidence, expected = model.logits(hidden[10:20]).softmax(-1).max(-1)
    with mosaic.compile(str(tmp_path), dtype="float32") as compiled:
        step = compiled(tokens)
        assert step.token_ids.tolist() == expected.tolist()
        assert (step.confidence - confidence).abs().max() < 1e-4


def test_the_learning_rate_warms_up_holds_and_ends_at_zero(small: SimpleNamespace) -> None:
    rate = small.train.learning_rate
    assert 0 < rate(0.0, 1.0) < 0.1 and rate(0.1, 1.0) == rate(0.5, 1.0) == 1.0
    assert rate(0.8, 1.0) == pytest.approx(0.5) and rate(1.0, 1.0) == 0.0


@pytest.mark.soak
def test_a_toy_training_ends_in_time_with_a_checkpoint_and_its_curves(
    small: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    monkeypatch.setattr(small.train, "LOG_EVERY", 2)
    monkeypatch.setattr(small.train, "small_sets", lambda *_: evaluation_set(tasks=("addition",), per_task=1))
    small.train.main(
        ["--family", "llada", "--toy", "--out", str(tmp_path), "--seconds", "4", "--reserve", "1", "--tokens", "256",
         "--workers", "1"]
    )  # fmt: skip
    curves = json.loads((tmp_path / "curves.json").read_text())
    assert {"steps", "tokens", "wall_s", "evaluations", "curve", "model"} <= set(curves)
    assert curves["curve"][-1]["learning_rate"] < curves["peak_learning_rate"]
    assert curves["evaluations"][-1]["by_task"]["addition"]["count"] == 1
    assert (tmp_path / "model.safetensors").is_file()


# --- the bench --------------------------------------------------------------------------------------------------------


@dataclass
class Answered:
    """The fields of a Generation that the bench reads."""

    token_ids: Any
    steps: int = 7


def answering(answers: dict[tuple[int, ...], str], seen: list[Any]) -> Any:
    """A `generate` that knows the answers."""

    def generate(model: Any, prompts: list[Any], config: Any) -> list[Answered]:
        seen.append(config)
        return [Answered(torch.tensor(vocabulary().encode(answers[tuple(p.tolist())] + "[EOS]"))) for p in prompts]

    return generate


def test_the_bench_scores_what_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = pytest.importorskip("mosaic.decoding")
    from benchmarks.quality.exact import ExactSettings, measure_exact

    asked = ExactSettings(lengths=(256,), per_task=2, options={"temperature": 0.5}, batch=3)
    items = evaluation_set(lengths=(256,), per_task=2)
    answers = {tuple(vocabulary().encode(item.prompt)): item.answer for item in items}
    wrong = next(item for item in items if item.task == "sorting")
    answers[tuple(vocabulary().encode(wrong.prompt))] = " Answer: 1"
    seen: list[Any] = []
    monkeypatch.setattr(decoding, "generate", answering(answers, seen))
    shown: list[tuple[int, int]] = []
    checked: list[Any] = []
    model = SimpleNamespace(architecture=load("small").architecture, check=checked.append)
    result = measure_exact(model, asked, progress=lambda done, total, _: shown.append((done, total)))
    assert shown[-1] == (len(items), len(items)) == (30, 30)
    assert {task: share["exact"] for task, share in result["by_task"].items()} == {
        task: 0.5 if task == "sorting" else 1.0 for task in TASKS
    }
    assert {config.gen_length for config in seen} == {32, 64, 96} and {config.temperature for config in seen} == {0.5}
    assert json.loads(json.dumps(result))["items"][0]["steps"] == 7
    assert len(checked) == len(seen)  # every batch's steps are planned before any is decoded
    with pytest.raises(UsageError, match="a context of 9,000 tokens"):
        measure_exact(model, ExactSettings(tasks=("addition", "retrieval"), lengths=(9000,), per_task=1))
    assert len(seen) == len(checked) - 1
    with pytest.raises(UsageError, match="each task once"):
        ExactSettings(tasks=("addition", "addition"))
    pytest.importorskip("matplotlib")
    from benchmarks.quality.plot import png

    assert png(result, "title").startswith(b"\x89PNG")


def test_a_checkpoint_with_other_tokens_is_refused(tmp_path: Path, small: SimpleNamespace) -> None:
    from benchmarks.quality.exact import check_vocabulary

    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        check_vocabulary(tmp_path)
    document = json.loads(small.tokenizer_files.tokenizer_json())
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    check_vocabulary(tmp_path)
    del document["model"]["vocab"]["ĠAnna"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="another vocabulary"):
        check_vocabulary(tmp_path)


def test_questions_and_scores_need_no_torch() -> None:
    import subprocess

    code = (
        "import sys\n"
        "from benchmarks.quality import evaluation, exact, scoring\n"
        "evaluation.evaluation_set(lengths=(256,), per_task=1)\n"
        "print([m for m in ('torch', 'matplotlib', 'tokenizers', 'numpy') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert shown.stdout.strip() == "[]"


def test_the_commands_tables_show_shares() -> None:
    from rich.console import Console

    from benchmarks.quality.tables import exact_tables

    items = evaluation_set(lengths=(256,), per_task=1)
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for table in exact_tables(summary([score(item, item.answer) for item in items])):
        console.print(table)
    console.file.close()
    text = console.export_text()
    assert "sorting" in text and "100.0%" in text and "256" in text and "90%" in text
