"""Reading Mooncake's and Azure's traces, and saying which line is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.workloads.azure import read_azure
from loadtest.workloads.mooncake import read_mooncake
from loadtest.workloads.trace import TraceRequest, TraceSlice, parse_slice, slice_requests
from shared.errors import ConfigError

GOOD = '{"timestamp": 5000, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}'
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_mooncake_lines_become_requests_with_times_from_the_first_on(tmp_path: Path) -> None:
    later = '{"timestamp": 8500, "input_length": 512, "output_length": 9, "hash_ids": [7]}'
    found = list(read_mooncake(write(tmp_path, f"{GOOD}\n\n{later}\n")))
    assert found == [TraceRequest(0.0, 600, 5, (0, 1)), TraceRequest(3.5, 512, 9, (7,))]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", "not JSON"),
        ("[1, 2]", "expected a JSON object"),
        ('{"input_length": 1, "output_length": 1, "hash_ids": [1]}', "timestamp must be milliseconds"),
        ('{"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": [1]}', "timestamp must be milliseconds"),
        (
            '{"timestamp": 9e3, "input_length": "8", "output_length": 1, "hash_ids": [1]}',
            "input_length must be a whole",
        ),
        ('{"timestamp": 9e3, "input_length": 1, "output_length": 0, "hash_ids": [1]}', "output_length must be a whole"),
        ('{"timestamp": 9e3, "input_length": 1, "output_length": 1}', "hash_ids must be a list"),
        ('{"timestamp": 9e3, "input_length": 1, "output_length": 1, "hash_ids": ["a"]}', "hash_ids must be a list"),
        ('{"timestamp": 9e3, "input_length": 513, "output_length": 1, "hash_ids": [1]}', "513 tokens are 2 blocks"),
        ('{"timestamp": 100, "input_length": 1, "output_length": 1, "hash_ids": [1]}', "goes back in time"),
    ],
)
def test_a_malformed_mooncake_line_is_named_by_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path, f"{GOOD}\n{GOOD}\n{line}\n")
    with pytest.raises(ConfigError, match=message) as raised:
        list(read_mooncake(path))
    assert raised.value.details["line"] == 3
    assert f"{path}, line 3: " in raised.value.message


def test_azure_rows_become_requests_without_prefix_structure(tmp_path: Path) -> None:
    rows = "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\r\n"
    found = list(read_azure(write(tmp_path, HEADER + rows)))
    assert [r.num_prompt_tokens for r in found] == [374, 396]
    assert found[1].at_s == pytest.approx(4.314579, abs=1e-6)
    assert found[0].hash_ids == ()


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "expected the header"),
        ("a,b,c\n", 1, "expected the header"),
        (HEADER + "2023-11-16 18:15:46,1\n", 2, "expected 3 columns, got 2"),
        (HEADER + "yesterday,1,1\n", 2, "must be a date and time"),
        (HEADER + "2023-11-16 18:15:46,1,1\n2023-11-16 18:15:47,x,1\n", 3, "ContextTokens must be a whole"),
        (HEADER + "2023-11-16 18:15:46,1,0\n", 2, "GeneratedTokens must be a whole"),
        (HEADER + "2023-11-16 18:15:46,1,1\n2023-11-16 18:15:40,1,1\n", 3, "goes back in time"),
    ],
)
def test_a_malformed_azure_row_is_named_by_its_number(tmp_path: Path, text: str, line: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        list(read_azure(write(tmp_path, text)))
    assert raised.value.details["line"] == line


def test_a_trace_that_is_not_there_or_no_text_is_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the trace .*No such file"):
        list(read_mooncake(tmp_path / "none"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        list(read_mooncake(tmp_path / "binary"))


def test_a_slice_takes_its_start_and_not_its_end_and_reads_no_further() -> None:
    def lines() -> object:
        for at_s in (0.0, 5.0, 9.9, 10.0):
            yield TraceRequest(at_s, 1, 1)
        raise AssertionError("read behind the slice")

    found = slice_requests(lines(), TraceSlice(5.0, 10.0))  # type: ignore[arg-type]
    assert [request.at_s for request in found] == [5.0, 9.9]


@pytest.mark.parametrize("text", ["5", "a:b", "9:3", "-1:4", "nan:3"])
def test_slices_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_slice(text)
    assert raised.value.field == "slice"
