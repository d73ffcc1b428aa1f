from __future__ import annotations

import json
from pathlib import Path

import pytest

from evalkit.adapters.datasets import count_rows, read_rows
from evalkit.adapters.scorers import find_scorer
from evalkit.adapters.suite import Dataset, Suite, load_suite
from evalkit.ground.errors import DataError, UsageError
from evalkit.verbs.evaluate import check_suite


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    return tmp_path


def write(directory: Path, text: str) -> Path:
    path = directory / "evals.yaml"
    path.write_text(text)
    return path


def load(directory: Path, text: str) -> Suite:
    return load_suite(write(directory, text))


def test_defaults_are_overridden_and_paths_are_relative_to_the_suite(directory: Path) -> None:
    suite = load(
        directory,
        """
        eval:
          defaults: {temperature: 0.5, max_response_len: 7, rm_type: exact, stop: "\\n"}
          datasets:
            - {name: one, path: a.jsonl}
            - name: two
              path: a.jsonl
              rm_type: my_pkg.scores:close
              temperature: 0
              top_k: 5
              top_p: 0.9
              stop: ["a", "b"]
              min_new_tokens: 2
              n_samples_per_eval_prompt: 4
              metadata_overrides: {kind: hard}
              seed: 3
              limit: 10
              tool_key: null
        """,
    )
    one, two = suite.datasets
    assert one == Dataset(
        name="one", path=directory / "a.jsonl", rm_type="exact", temperature=0.5, max_response_len=7, stop=("\n",)
    )
    assert (two.rm_type, two.temperature, two.top_k, two.top_p) == ("my_pkg.scores:close", 0.0, 5, 0.9)
    assert (two.stop, two.min_new_tokens, two.n_samples_per_eval_prompt) == (("a", "b"), 2, 4)
    assert (two.metadata_overrides, two.seed, two.limit, two.tool_key) == ({"kind": "hard"}, 3, 10, None)
    assert two.max_response_len == 7


def test_datasets_may_be_a_mapping_by_name(directory: Path) -> None:
    suite = load(
        directory, "eval: {datasets: {one: {path: a.jsonl, rm_type: exact}, two: {path: a.jsonl, rm_type: regex}}}"
    )
    assert [dataset.name for dataset in suite.datasets] == ["one", "two"]


def test_anchors_and_merge_keys_work(directory: Path) -> None:
    suite = load(
        directory,
        """
        eval:
          datasets:
            - &a {name: one, path: a.jsonl, rm_type: exact, top_k: 3}
            - {<<: *a, name: two}
        """,
    )
    assert [(dataset.name, dataset.top_k) for dataset in suite.datasets] == [("one", 3), ("two", 3)]


GOOD = "name: d, path: a.jsonl, rm_type: exact"
MISTAKES = {
    "": "is empty",
    "eval: [": "is not YAML: line 1",
    "- 1": ":1: the suite must be a mapping",
    "evals: {}": ":1: the suite has the unknown field 'evals'",
    "eval: {defaults: {}}": ":1: eval.datasets is missing",
    "eval: {datasets: []}": ":1: eval.datasets names no dataset",
    "eval: {datasets: 3}": ":1: eval.datasets must be a list",
    "eval:\n  datasets:\n  - 3": ":3: eval.datasets[0] must be a mapping",
    "eval:\n  defaults: {path: a}\n  datasets: []": ":2: eval.defaults has the unknown field 'path'",
    "eval:\n  datasets:\n  - {path: a.jsonl, rm_type: exact}": ":3: eval.datasets[0].name is missing",
    "eval:\n  datasets:\n  - {name: d, rm_type: exact}": ":3: eval.datasets[0].path is missing",
    "eval:\n  datasets:\n  - {name: d, path: a.jsonl}": ":3: eval.datasets[0].rm_type is missing",
    "eval:\n  datasets:\n  - {name: d, path: b.jsonl, rm_type: exact}": ":3: eval.datasets[0].path: there is no file",
    "eval:\n  datasets:\n  - {name: ../d, path: a.jsonl, rm_type: exact}": ":3: eval.datasets[0].name must be of",
    "eval:\n  datasets:\n  - {name: 5, path: a.jsonl, rm_type: exact}": ":3: eval.datasets[0].name must be of letters",
    "eval:\n  datasets:\n    a/b: {path: a.jsonl, rm_type: exact}": ":3: eval.datasets[a/b].name must be of letters",
    "eval:\n  datasets:\n    a: {name: b, path: a.jsonl, rm_type: exact}": ":3: eval.datasets[a].name is b",
    f"eval:\n  datasets:\n  - {{{GOOD}}}\n  - {{{GOOD}}}": ":4: eval.datasets names d twice",
    f"eval:\n  datasets:\n  - {{{GOOD}, name: e}}": ":3: eval.datasets[0] has 'name' twice",
    f"eval:\n  datasets:\n  - {{{GOOD},\n     temprature: 1}}": ":4: eval.datasets[0] has the unknown field 'temprat",
    "eval:\n  datasets:\n  - {name: d, path: a.jsonl, rm_type: math}": ":3: eval.datasets[0].rm_type must be one of",
    "eval:\n  datasets:\n  - {name: d, path: a.jsonl, rm_type: 'a b:c'}": ":3: eval.datasets[0].rm_type must be one of",
}
for field, value, problem in [
    ("temperature", "-1", "must be a number of 0 or more, not -1"),
    ("temperature", "true", "must be a number of 0 or more, not True"),
    ("temperature", "1e-3", "must be a number of 0 or more, not '1e-3' (YAML wants 1.0e-3)"),
    ("temperature", ".inf", "must be a number of 0 or more, not inf"),
    ("temperature", ".nan", "must be a number of 0 or more, not nan"),
    ("top_p", "0", "must be a number above 0 and at most 1, not 0"),
    ("top_p", "1.1", "must be a number above 0 and at most 1, not 1.1"),
    ("top_k", "-2", "must be a whole number of -1 (all) or more, not -2"),
    ("top_k", "1.5", "must be a whole number of -1 (all) or more, not 1.5"),
    ("max_response_len", "0", "must be a whole number of 1 or more, not 0"),
    ("min_new_tokens", "-1", "must be a whole number of 0 or more, not -1"),
    ("min_new_tokens", "999", "is above max_response_len (256)"),
    ("n_samples_per_eval_prompt", "0", "must be a whole number of 1 or more, not 0"),
    ("seed", "x", "must be a whole number of 0 or more, not 'x'"),
    ("limit", "0", "must be a whole number of 1 or more, not 0"),
    ("stop", "[1]", "must be a text or a list of texts, not [1]"),
    ("input_key", "[]", "must be a text, not []"),
    ("label_key", "3", "must be a text, not 3"),
    ("metadata_overrides", "3", "must be a mapping, not 3"),
]:
    text = f"eval:\n  datasets:\n\n  - {{{GOOD}, {field}: {value}}}"
    MISTAKES[text] = f":4: eval.datasets[0].{field} {problem}"


@pytest.mark.parametrize(("text", "message"), MISTAKES.items(), ids=MISTAKES.values())
def test_a_mistake_is_told_with_file_line_and_field(directory: Path, text: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        load(directory, text)
    assert str(directory / "evals.yaml") in caught.value.message
    assert message in caught.value.message
    assert "\n" not in str(caught.value)


def test_a_suite_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(UsageError, match=r"there is no suite .*; give one with --suite"):
            load_suite(path)


def test_a_suite_must_be_utf_8(tmp_path: Path) -> None:
    (tmp_path / "evals.yaml").write_bytes(b"eval: \xff")
    with pytest.raises(DataError, match=r"evals.yaml is not UTF-8: .* at byte 6"):
        load_suite(tmp_path / "evals.yaml")


ROWS = {
    "{": ":2: not JSON",
    "3": ":2: a row must be a JSON object",
    '{"prompt": "x", "label": "1"}': ":2: there is no 'input' (input_key); the row has prompt, label",
    '{"input": 3, "label": "1"}': ":2: 'input' must be a text or a list of chat messages",
    '{"input": "", "label": "1"}': ":2: 'input' must be a text or a list of chat messages",
    '{"input": [{"content": "x"}], "label": "1"}': ":2: 'input' must be a text or a list of chat messages",
    '{"input": "x"}': ":2: there is no 'label' (label_key); the row has input",
    '{"input": "x", "label": "abc"}': ":2: 'label' must be a number, not 'abc'",
    '{"input": "x", "label": true}': ":2: 'label' must be a text or a number, not True",
    '{"input": "x", "label": 1, "tools": [{}]}': ":2: 'tools' must be a list of tools, beside a prompt of chat",
    '{"input": "x", "label": 1, "meta": 3}': ":2: 'meta' must be a mapping",
}


@pytest.mark.parametrize(("row", "message"), ROWS.items(), ids=ROWS.values())
def test_a_bad_row_is_told_with_file_line_and_field(tmp_path: Path, row: str, message: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"input": "1", "label": 1}\n' + row + "\n")
    dataset = Dataset(name="d", path=path, rm_type="numeric", tool_key="tools", metadata_key="meta")
    with pytest.raises(DataError) as caught:
        count_rows(dataset, find_scorer("numeric", tmp_path))
    assert f"{path}{message}" in caught.value.message


def test_a_dataset_without_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n \n")
    suite = load(tmp_path, f"eval: {{datasets: [{{{GOOD}}}]}}")
    with pytest.raises(DataError, match=r"a\.jsonl has no rows"):
        check_suite(suite)


def test_a_label_that_is_no_regular_expression_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"input": "x", "label": "("}\n')
    suite = load(tmp_path, "eval: {datasets: [{name: d, path: a.jsonl, rm_type: regex}]}")
    with pytest.raises(DataError, match=r"a.jsonl:1: 'label' must be a regular expression, not '\('"):
        check_suite(suite)


def test_rows_carry_label_metadata_and_tools(tmp_path: Path) -> None:
    row = {"q": [{"role": "user", "content": "x"}], "gold": [1], "meta": {"a": 1, "b": 2}, "tools": [{"type": "f"}]}
    path = tmp_path / "d.jsonl"
    path.write_text("\n" + json.dumps(row) + "\n\n" + json.dumps({**row, "meta": None}) + "\n")
    dataset = Dataset(
        name="d", path=path, rm_type="json:dumps", input_key="q", label_key="gold", metadata_key="meta",
        tool_key="tools", metadata_overrides={"b": 3},
    )  # fmt: skip
    first, second = read_rows(dataset, find_scorer(dataset.rm_type, tmp_path))
    assert (first.index, second.index) == (0, 1)
    assert first.prompt == row["q"]
    assert (first.label, first.tools) == ([1], [{"type": "f"}])
    assert first.sample == {**row, "metadata": {"a": 1, "b": 3}}
    assert second.sample["metadata"] == {"b": 3}


def test_limit_takes_the_first_rows(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"input": str(i), "label": i}) + "\n" for i in range(5)) + "broken\n")
    dataset = Dataset(name="d", path=path, rm_type="exact", limit=3)
    assert [row.prompt for row in read_rows(dataset, find_scorer("exact", tmp_path))] == ["0", "1", "2"]
