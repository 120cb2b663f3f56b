"""The border of prompt and answer under many tokenizers: trained is the whole answer, after the prompt's own tokens.

The reference is transformers' own tokenizing of the prompt alone, and of the answer by the same tokenizer built without
the space that it adds to the beginning of a text.
"""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from data_helpers import prepare, write_jsonl
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter, bytes_to_unicode
from transformers.integrations.mistral import convert_tekken_tokenizer

from finetune.data.chat.renderer import build_renderer
from finetune.data.dataset import questions
from finetune.data.samples import BadRow, Conversation, Message, Preference, PromptCompletion, PromptOnly
from finetune.errors import UserError

from .test_data_mistral import FILES, from_sentencepiece

CORPUS = [
    "USER: the quick brown fox (and a dog) says: Answer fine. ASSISTANT: A is fine, 12 and 1234 are not!",
    "[INST] Answer the question: what's 12? [/INST] A fine answer: four.\n\nAnswer:\nfine\n\tquick\n",
    "Answer: A\nAnswer: B  Answer:  fine (see above) é 漢字 an answer, quickly; don't answer.",
]
MARKS = ["<unk>", "<s>", "</s>"]
NUMBERS = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def trained(backend: Tokenizer, trainer: Callable[..., Any], **options: Any) -> PreTrainedTokenizerFast:
    backend.train_from_iterator(
        CORPUS * 5, trainer(vocab_size=420, special_tokens=MARKS, show_progress=False, **options)
    )
    return with_marks(backend)


def with_marks(backend: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


UNIGRAM = partial(trainers.UnigramTrainer, unk_token="<unk>")


def changed(tokenizer: PreTrainedTokenizerFast, **parts: Any) -> PreTrainedTokenizerFast:
    """The same vocabulary with other parts."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    for name, part in parts.items():
        setattr(backend, name, part)
    return with_marks(backend)


Pair = tuple[PreTrainedTokenizerFast, PreTrainedTokenizerFast]  # as used, and without a space at the beginning


def byte_level(regex: str = "", prefix: bool = False, trim: bool = False, ignore_merges: bool = False) -> Pair:
    def part(prefix: bool) -> pre_tokenizers.PreTokenizer:
        if not regex:
            return pre_tokenizers.ByteLevel(add_prefix_space=prefix)
        split = pre_tokenizers.Split(Regex(regex), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)])

    backend = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    backend.pre_tokenizer, backend.decoder = part(prefix), decoders.ByteLevel()
    if trim:
        backend.post_processor = processors.ByteLevel(trim_offsets=True)
    made = trained(backend, trainers.BpeTrainer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    return made, changed(made, pre_tokenizer=part(False))


def prepended() -> Pair:
    """Llama 2, Mistral v0.x, TinyLlama."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    bare = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), bare])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    backend.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")
    made = trained(backend, trainers.BpeTrainer)
    made = changed(made, pre_tokenizer=None)
    return made, changed(made, normalizer=bare)


def metaspace(scheme: str, split: bool, model: Any = None, trainer: Any = trainers.BpeTrainer) -> Pair:
    def part(scheme: Any) -> pre_tokenizers.PreTokenizer:
        return pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)

    backend = Tokenizer(model or models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made = trained(backend, trainer)
    made = changed(made, pre_tokenizer=part(scheme), decoder=decoders.Metaspace(prepend_scheme=scheme))
    return made, changed(made, pre_tokenizer=part("never"))


def collapsing_unigram() -> Pair:
    """T5: white space becomes one space, none at the end."""
    made, bare = metaspace("always", True, models.Unigram(), UNIGRAM)
    rules = [normalizers.NFKC(), normalizers.Strip(left=False), normalizers.Replace(Regex(r"\s+"), " ")]
    rule = normalizers.Sequence(rules)
    return changed(made, normalizer=rule), changed(bare, normalizer=rule)


def word_piece(lowercase: bool) -> Pair:
    backend = Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    made = trained(backend, trainers.WordPieceTrainer)
    return made, made


def word_ends() -> Pair:
    """CLIP: the last token of a word has a mark."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.BPEDecoder(suffix="</w>")
    made = trained(backend, trainers.BpeTrainer, end_of_word_suffix="</w>")
    return made, made


def characters() -> Pair:
    backend = Tokenizer(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Split("", behavior="isolated"), decoders.Fuse()
    backend.train_from_iterator(CORPUS, trainers.WordLevelTrainer(special_tokens=MARKS, show_progress=False))
    made = with_marks(backend)
    return made, made


def tiktoken() -> Pair:
    """As transformers converts the file of a tiktoken vocabulary."""
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    words = [token for token in byte_level(NUMBERS)[0].get_vocab() if token not in MARKS]
    ranks = sorted((bytes(map(byte_of.__getitem__, token)) for token in words), key=lambda token: (len(token), token))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ranks.tiktoken"
        path.write_text("".join(f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(ranks)))
        backend = TikTokenConverter(str(path), pattern=NUMBERS, extra_special_tokens=MARKS).converted()
    made = with_marks(backend)
    return made, made


def mistral(legacy: bool) -> Pair:
    file = "tokenizer.model.v1" if legacy else "mistral_instruct_tokenizer_240323.model.v3"
    made = from_sentencepiece(FILES / file, legacy)
    part = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    bare = {"normalizer": normalizers.Replace(" ", "▁")} if legacy else {"pre_tokenizer": part}
    return made, changed(made, **bare)


def tekken() -> Pair:
    made = convert_tekken_tokenizer(str(FILES / "tekken_240718.json"))
    return made, made


KINDS: dict[str, Callable[[], Pair]] = {
    "byte level": byte_level,
    "byte level, offsets trimmed": lambda: byte_level(trim=True),
    "byte level, a space first": lambda: byte_level(prefix=True),
    "byte level, Qwen's words": lambda: byte_level(NUMBERS),
    "byte level, merges ignored": lambda: byte_level(NUMBERS, ignore_merges=True),
    "Prepend": prepended,
    "Metaspace always": lambda: metaspace("always", True),
    "Metaspace always, unsplit": lambda: metaspace("always", False),
    "Metaspace first": lambda: metaspace("first", False),
    "Metaspace never": lambda: metaspace("never", True),
    "Unigram": lambda: metaspace("always", True, models.Unigram(), UNIGRAM),
    "Unigram, spaces collapsed": collapsing_unigram,
    "WordPiece": lambda: word_piece(False),
    "WordPiece, lower case": lambda: word_piece(True),
    "ends of words": word_ends,
    "characters": characters,
    "tiktoken": tiktoken,
    "Mistral v1": lambda: mistral(True),
    "Mistral v3": lambda: mistral(False),
    "tekken": tekken,
}


@lru_cache
def made(kind: str) -> Pair:
    return KINDS[kind]()


ENDINGS = [" ", "  ", "\t", "\n", "\n\n", " \n", "", "q", "1", "(", ":", ": ", "'", "é", "漢"]
ANSWERS = ["A", "fine, 12", "quick", "12", "(a)", "\nfine"]
START = "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
TEMPLATES = {
    "none": None,
    "Llama 2": START
    + "[INST] {{ m.content }} [/INST]{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}",
    "Mistral v0.x": START
    + "[INST] {{ m.content }} [/INST]{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
    "Vicuna": START + "USER: {{ m.content }} {% else %}ASSISTANT: {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}",
    "a space": START
    + "USER: {{ m.content }} {% else %}ASSISTANT: {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}",
    "the content alone": START + "{{ m.content }}{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
}


def texts_of(template: str, prompt: str, answer: str) -> tuple[str, str]:
    """(text in use, text that the model writes after it)."""
    return {
        "none": (prompt, answer + "</s>"),
        "Llama 2": (f"<s>[INST] {prompt} [/INST]", f" {answer} </s>"),
        "Mistral v0.x": (f"<s>[INST] {prompt} [/INST]", f"{answer}</s>"),
        "Vicuna": (f"<s>USER: {prompt} ASSISTANT:", f" {answer}</s>"),
        "a space": (f"<s>USER: {prompt} ASSISTANT: ", f"{answer}</s>"),
        "the content alone": (f"<s>{prompt}", f"{answer}</s>"),
    }[template]


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def given_and_written(kind: str, template: str, prompt: str, answer: str) -> tuple[list[int], list[int]]:
    used, bare = made(kind)
    before, after = texts_of(template, prompt, answer)
    given, whole = ids_of(used, before), ids_of(used, before + after)
    return given, whole[len(given) :] if whole[: len(given)] == given else ids_of(bare, after)


def ours(kind: str, template: str, prompt: str, answer: str) -> tuple[list[int], list[int]]:
    tokenizer = made(kind)[0]
    tokenizer.chat_template = TEMPLATES[template]
    renderer = build_renderer(tokenizer)
    ((rendered,),) = renderer.draw(PromptCompletion(prompt, answer))
    ids, mask = renderer.tokenize([rendered])[0][:2]
    assert mask[mask.argmax() :].all()
    return ids[~mask].tolist(), ids[mask].tolist()


# (template, ending) of prompts that have no token of their own before some answers: words that go on, which WordPiece
# and ends of words write otherwise. All others are trained whole.
IN_A_WORD = {"none", "the content alone", "Mistral v0.x"}
REFUSING = {"WordPiece", "WordPiece, lower case", "ends of words"}


# Every kind and every template in the default tests, every pair with --all.
PAIRS = [
    pytest.param(kind, template, marks=[] if (i - j) % len(TEMPLATES) == 0 else pytest.mark.long)
    for i, kind in enumerate(KINDS)
    for j, template in enumerate(TEMPLATES)
]


@pytest.mark.parametrize(("kind", "template"), PAIRS)
def test_the_whole_answer_is_trained_after_the_prompts_own_tokens(kind: str, template: str):
    refused = set[str]()
    for ending, answer in product(ENDINGS, ANSWERS):
        prompt = f"Answer{ending}"
        try:
            found = ours(kind, template, prompt, answer)
        except BadRow:
            refused.add(ending)
        else:
            assert found == given_and_written(kind, template, prompt, answer), (ending, answer)
    assert not refused or (kind in REFUSING and template in IN_A_WORD)
    assert template == "Mistral v0.x" or not any(ending[-1:].isspace() for ending in refused)


QUESTION = "the question"


@pytest.mark.parametrize("kind", ["Prepend", "Metaspace first", "Mistral v1", "Unigram", "byte level"])
def test_every_kind_of_row_has_the_prompt_that_is_sampled_from(kind: str):
    """Pairs, and the turns of a conversation; a prompt without an answer is what rollouts are given."""
    tokenizer = made(kind)[0]
    tokenizer.chat_template = TEMPLATES["a space"]
    renderer = build_renderer(tokenizer)
    asked = Conversation((Message("user", QUESTION),))
    ((prompt,),) = renderer.draw(PromptOnly(asked))
    given = renderer.tokenize([prompt])[0][0].tolist()
    pair = Preference(*(Conversation((*asked.messages, Message("assistant", text))) for text in ("A", "fine")))
    turns = [Message("assistant", "A"), *asked.messages, Message("assistant", "fine")]
    ((whole,),) = renderer.draw(Conversation((*asked.messages, *turns)))
    for answer, rendered in zip(("A", "fine", "A"), [*renderer.draw(pair)[0], whole], strict=True):
        ids, mask = renderer.tokenize([rendered])[0][:2]
        assert ids[: len(given)].tolist() == given
        assert not mask[: len(given)].any()
        written = ids_of(made(kind)[1], f"{answer}</s>")
        assert ids[mask][: len(written)].tolist() == written
    assert tokenizer.decode(ids[mask]).replace(" ", "") == "A</s>fine</s>"


def test_a_row_that_cannot_be_cut_is_skipped(tmp_path: Path):
    rows = [{"prompt": "Answer", "completion": "quick"}, {"prompt": "Answer:", "completion": "quick"}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    tokenizer = made("WordPiece")[0]
    tokenizer.chat_template = None
    with pytest.raises(UserError, match=r"rows\.jsonl:1: the tokenizer cannot separate 'Answer' from 'quick'"):
        prepare(path, "prompt_completion", tokenizer=tokenizer)
    changes = {"data__on_bad_row": "skip", "data__max_bad_share": 0.5}
    (example,) = prepare(path, "prompt_completion", tokenizer=tokenizer, **changes)
    assert example.row == 2


def test_the_reference_of_an_exact_match_is_the_whole_answer(tmp_path: Path):
    tokenizer = made("Prepend")[0]
    tokenizer.chat_template = None
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "Answer: ", "completion": "A"}])
    (question,) = questions(prepare(path, "prompt_completion", tokenizer=tokenizer), {tokenizer.eos_token_id})
    assert question.prompt == ids_of(tokenizer, "Answer: ")
    assert tokenizer.convert_ids_to_tokens(question.reference) == ["A"]
