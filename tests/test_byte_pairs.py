"""Tokenizers that come as vocab.json and merges.txt, as Dream's: token for token those of transformers' Qwen2 class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

import mosaic
from mosaic.decoding import Tokenizer, generate
from mosaic.errors import CheckpointError

TEXT = [
    "The quick brown fox jumps over the lazy dog. It's what they'll do; I'd say we've 1234 reasons, don't you?",
    "def f(x):\n    return x ** 2  # naïve\n\n\n\tprint(f(3))\r\n", "Ünïcödé Straße, 東京 42, مرحبا, 🙂🙃",
] * 3  # fmt: skip
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|beginoftext|>", "<|mask|>"]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory such as Dream's, with a small vocabulary."""
    path = tmp_path_factory.mktemp("dream")
    made = Backend(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    made.model.save(str(path))
    size = made.get_vocab_size()
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    added = {str(size + i): {"content": token, **flags} for i, token in enumerate(SPECIAL)}
    config = {"tokenizer_class": "DreamTokenizer", "added_tokens_decoder": added, "chat_template": CHAT}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def stock(folder: Path) -> Any:
    merges = [line for line in (folder / "merges.txt").read_text().splitlines() if not line.startswith("#")]
    return Qwen2Tokenizer(
        vocab=json.loads((folder / "vocab.json").read_text()), merges=[tuple(line.split(" ")) for line in merges],
        additional_special_tokens=SPECIAL[1:],
    )  # fmt: skip


def test_the_tokens_are_those_of_transformers(folder: Path, stock: Any) -> None:
    own = Tokenizer(folder)
    for text in (*TEXT, "<|im_start|>user\nhi<|im_end|>", "e\u0301 → é", ""):
        assert own.encode(text) == stock.encode(text)
    assert own.encode("".join(SPECIAL)) == list(range(min(own.encode(SPECIAL[0])), min(own.encode(SPECIAL[0])) + 5))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=40) | st.text(alphabet="aB é'stl \n\r\t0123#.", max_size=30))
def test_any_text_goes_the_same_way_and_comes_back(folder: Path, stock: Any, text: str) -> None:
    import unicodedata

    own = Tokenizer(folder)
    found = own.encode(text)
    assert found == stock.encode(text)
    assert own.decode(found) == unicodedata.normalize("NFC", text)


def test_special_tokens_are_left_out_and_a_conversation_is_rendered(folder: Path) -> None:
    own = Tokenizer(folder)
    ids = own.encode_chat([{"role": "user", "content": "It's 42"}])
    assert own.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nIt's 42<|im_end|>\n<|im_start|>assistant\n"
    assert own.decode(ids) == "user\nIt's 42\nassistant\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"tokenizer_class": "GPT2Tokenizer"},
            "of the class 'GPT2Tokenizer', known are DreamTokenizer, Qwen2Tokenizer",
        ),
        ({"tokenizer_class": None}, "of the class None"),
        ({"added_tokens_decoder": {"7": {"content": "<|x|>"}}}, "'<|x|>' has the id 7, with vocab.json it gets"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, "'added_tokens_decoder' must map ids to tokens"),
        ({"added_tokens_decoder": [1]}, "'added_tokens_decoder' must map ids to tokens"),
    ],
)
def test_what_cannot_be_is_refused(folder: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text()) | change
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        Tokenizer(tmp_path)
    assert message in str(caught.value)
    (tmp_path / "vocab.json").write_text("{")
    config["tokenizer_class"] = "DreamTokenizer"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"cannot read vocab\.json and merges\.txt"):
        Tokenizer(tmp_path)
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(
        CheckpointError, match=r"neither tokenizer\.json nor vocab\.json and merges\.txt: download them"
    ):
        Tokenizer(tmp_path)


def test_a_dream_checkpoint_answers_text(folder: Path, tmp_path: Path) -> None:
    config = {
        "model_type": "Dream", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48,
        "vocab_size": 512, "mask_token_id": 511, "torch_dtype": "float32",
    }  # fmt: skip
    with mosaic.compile(config) as model:
        model.save(tmp_path)
    with mosaic.compile(tmp_path) as model:
        with pytest.raises(CheckpointError, match=r"neither tokenizer\.json nor vocab\.json"):
            generate(model, "It's", gen_length=4)
        for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
            (tmp_path / name).write_bytes((folder / name).read_bytes())
        answer = generate(model, [[{"role": "user", "content": "It's 42"}]], gen_length=4, stop_at_eos=False)[0]
        assert isinstance(answer.text, str) and answer.prompt_ids.tolist() == Tokenizer(folder).encode_chat(
            [{"role": "user", "content": "It's 42"}]
        )
