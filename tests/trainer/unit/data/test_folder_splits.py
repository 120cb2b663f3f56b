"""The files of a folder that a split takes are those that `datasets` takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets.data_files import DataFilesDict, get_data_patterns

from finetune.data.sources.source import SourceReader
from finetune.data.sources.splits import splits_by_name
from finetune.errors import UserError
from finetune.recipe.schema import Source

NAMES = {
    "shards of the hub": [
        "data/train-00000-of-00002.parquet",
        "data/train-00001-of-00002.parquet",
        "data/test-00000-of-00001.parquet",
    ],
    "shards of other splits": [
        "data/train_sft-00000-of-00001.parquet",
        "data/test_sft-00000-of-00001.parquet",
        "notes.jsonl",
    ],
    "words in names": ["train-0.parquet", "train-1.parquet", "test-0.parquet"],
    "other words": ["my_training.jsonl", "dev.jsonl", "x-valid-2.jsonl", "evaluation.jsonl"],
    "a word within a word": ["trainer.jsonl", "latest.jsonl", "contest-2.jsonl"],
    "digits are between words": ["a1train2.jsonl", "b3test4.jsonl"],
    "folders": ["train/a.jsonl", "train/deep/b.jsonl", "test/a.jsonl", "other.jsonl"],
    "words in folders": ["my_train/a.jsonl", "val-2/a.jsonl", "train.jsonl"],
    "both words": ["train-test.jsonl", "train.jsonl"],
    "no words": ["a.jsonl", "deep/b.jsonl"],
    "capitals are no words": ["Train.jsonl", "a.jsonl"],
    "a word of a split beside others": ["train.jsonl", "extra.jsonl"],
    "a word without an end": ["train", "test.jsonl"],
}


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES.keys())
def test_names_are_of_the_splits_of_datasets(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    theirs = DataFilesDict.from_patterns(get_data_patterns(str(tmp_path)), base_path=str(tmp_path))
    relative = {
        str(split): sorted({Path(file).relative_to(tmp_path).as_posix() for file in files})
        for split, files in theirs.items()
    }
    assert {split: sorted(files) for split, files in splits_by_name(sorted(names)).items()} == relative


def written(folder: Path, **files: int) -> Path:
    """Writes a file of rows for each name, from one text on."""
    for name, first in files.items():
        path = folder / f"{name.replace('__', '/')}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"text": str(first)}) + "\n")
    return folder


def read(folder: Path, **settings: str) -> tuple[list[str], str | None]:
    reader = SourceReader(Source.model_validate({"path": str(folder), **settings}))
    return [row["text"] for _, _, row in reader.rows()], reader.note


def refused(folder: Path, *parts: str, **settings: str) -> None:
    with pytest.raises(UserError) as caught:
        read(folder, **settings)
    assert all(part in str(caught.value) for part in (str(folder), *parts, "Fix: ")), str(caught.value)


def test_a_folder_takes_its_split_and_says_what_it_leaves(tmp_path: Path) -> None:
    written(tmp_path, train_0=0, train_1=1, test_0=2, validation=3)
    texts, note = read(tmp_path)
    assert texts == ["0", "1"]
    left = "not taken: test_0.jsonl, validation.jsonl (other splits: `validation`, `test`)"
    assert note == f"{tmp_path}: split `train` is train_0.jsonl, train_1.jsonl; {left}"
    assert read(tmp_path, split="test")[0] == ["2"]
    assert read(tmp_path, split="train[1:]")[0] == ["1"]
    refused(tmp_path, "no split `dev`, but `train` (train_0.jsonl, train_1.jsonl)", split="dev")


def test_a_folder_of_one_split_is_taken_whole(tmp_path: Path) -> None:
    texts, note = read(written(tmp_path, test_a=0, test_b=1))
    assert (texts, note) == (
        ["0", "1"],
        f"{tmp_path}: all of its files are of the split `test` by their names, and all are taken",
    )
    assert read(written(tmp_path / "plain", a=0, b=1)) == (["0", "1"], None)


README = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: [main/test-*, "main/**/more.jsonl"]}
- config_name: socratic
  data_files: socratic/[tv]*.jsonl
- {config_name: folder, data_dir: socratic}
---
# About
"""


def test_configurations_of_a_readme(tmp_path: Path) -> None:
    written(
        tmp_path, **{"main__train-1": 0, "main__test-1": 1, "main__a__more": 2, "socratic__train": 3, "socratic__x": 4}
    )
    (tmp_path / "README.md").write_text(README)
    assert read(tmp_path, config="main")[0] == ["0"]
    assert read(tmp_path, config="main", split="test")[0] == ["2", "1"]
    assert read(tmp_path, config="socratic")[0] == ["3"]
    assert read(tmp_path, config="folder")[0] == ["3"]
    refused(tmp_path, "several configurations (`main`, `socratic`, `folder`")
    refused(tmp_path, "no configuration `x`", config="x")
    (tmp_path / "README.md").write_text(README.replace("config_name: main", "config_name: main\n  default: true"))
    assert read(tmp_path)[0] == ["0"]
    (tmp_path / "README.md").write_text("---\n{\n---\n")
    refused(tmp_path, "README.md names no configurations", config="main")
