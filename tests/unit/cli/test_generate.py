"""`tandem generate` sends what was asked for and shows what came."""

from __future__ import annotations

import json

import pytest

from shared.errors import InvalidRequest, NotFound, Overloaded
from tests.unit.cli.conftest import RunTandem
from tests.unit.cli.scripted_router import ScriptedRouter, answer_responses


def test_the_text_goes_to_stdout_and_id_and_split_to_stderr(tandem: RunTandem, router: ScriptedRouter) -> None:
    result = tandem("generate", "Say hello")
    assert result.status == 0
    assert result.out == "Hello, world\n"
    about, line, end = result.err.split("\n")
    assert (about, end) == (f"request {router.requests[0].request_id}", "")
    assert "in the router 10.0: queue 0.5, placement 1.0, prefill 7.0, return 0.5, rest 1.0; then ship 0.2" in line
    assert "9 tokens in (4 cached), 3 out" in line
    assert "prefill-0 → decode-1" in line


def test_a_prompt_is_a_chat_message_unless_raw(tandem: RunTandem, router: ScriptedRouter) -> None:
    tandem("generate", "Say hello")
    tandem("generate", "--raw", "Say hello")
    chat, raw = router.requests
    assert [(m.role, m.content) for m in chat.chat.messages] == [("user", "Say hello")]
    assert raw.text == "Say hello"


def test_token_ids_go_as_they_are(tandem: RunTandem, router: ScriptedRouter) -> None:
    tandem("generate", "--token-ids", "1, 15 9")
    assert list(router.requests[0].tokens.ids) == [1, 15, 9]


def test_a_dash_reads_the_prompt_from_stdin(tandem: RunTandem, router: ScriptedRouter) -> None:
    tandem("generate", "--raw", "-", stdin="from a pipe")
    assert router.requests[0].text == "from a pipe"


def test_sampling_options_reach_the_cluster(tandem: RunTandem, router: ScriptedRouter) -> None:
    tandem(
        *("generate", "x", "--max-tokens", "5", "--temperature", "0", "--top-p", "0.5", "--top-k", "7"),
        *("--seed", str(2**64 - 1), "--stop", "a", "--stop", "b", "--ignore-eos", "--model", "m"),
    )
    request = router.requests[0]
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (5, 0.0, 0.5, 7)
    assert sampling.HasField("temperature")
    assert (sampling.seed, list(sampling.stop), sampling.ignore_eos) == (2**64 - 1, ["a", "b"], True)
    assert request.model == "m"


def test_json_is_one_object_with_everything(tandem: RunTandem) -> None:
    result = tandem("generate", "x", "--json")
    answer = json.loads(result.out)
    assert result.err == ""
    assert answer["text"] == "Hello, world"
    assert answer["token_ids"] == [11, 12, 13]
    assert answer["finish_reason"] == "stop"
    counts = {"num_prompt_tokens": 9, "num_output_tokens": 3, "num_cached_tokens": 4}
    assert answer["usage"] == {**counts, "num_guessed_tokens": 0, "num_accepted_tokens": 0}
    assert answer["router_split"]["reserve_ms"] == 0.0
    assert answer["router_split"]["prefill_compute_ms"] == 7.0
    assert answer["ttft_ms"] > 0.0
    assert (answer["prefill_worker"], answer["decode_worker"]) == ("prefill-0", "decode-1")


def test_an_answer_of_the_decode_worker_alone_says_so(tandem: RunTandem, router: ScriptedRouter) -> None:
    router.responses = answer_responses()
    router.responses[-1].prefill_worker = ""
    assert "decode-1 alone" in tandem("generate", "x").err


def test_the_api_key_is_sent_as_a_bearer(
    tandem: RunTandem, router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_API_KEY", "sesame")
    tandem("generate", "x")
    assert router.metadata[0]["authorization"] == "Bearer sesame"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequest("temperature must be between 0 and 100, got -1"), 2),
        (NotFound("no model 'x' is served"), 2),
        (Overloaded("the queue is full", retry_after_s=2.0), 1),
    ],
)
def test_the_clusters_error_is_one_line(
    tandem: RunTandem, router: ScriptedRouter, error: InvalidRequest, status: int
) -> None:
    router.responses, router.error = [], error
    result = tandem("generate", "x")
    assert (result.status, result.out, result.err) == (status, "", f"tandem: {error.message}\n")


def test_a_connection_that_breaks_for_good_keeps_what_had_come(tandem: RunTandem, router: ScriptedRouter) -> None:
    router.responses, router.breaks = answer_responses()[:2], True
    result = tandem("generate", "x", "--retry-for", "0")
    assert result.status == 1
    assert result.out == "Hello, wor\n"
    about, line, _ = result.err.split("\n")
    assert about == f"request {router.requests[0].request_id}"
    assert line == f"tandem: the connection to {router.target} broke in the middle of the answer"


def test_a_connection_that_breaks_is_taken_up_where_it_was(tandem: RunTandem, router: ScriptedRouter) -> None:
    router.breaks_after = 2
    result = tandem("generate", "x", "--seed", "5")
    assert (result.status, result.out) == (0, "Hello, world\n")
    first, second = router.requests
    assert first.request_id == second.request_id
    assert (list(second.resume.token_ids), second.resume.num_chars) == ([11, 12], len("Hello, wor"))
    assert second.sampling.seed == 5


@pytest.mark.parametrize(
    "arguments",
    [
        ("--token-ids", "1,x"),
        ("--token-ids", "4294967296"),
        ("--token-ids", "9" * 5000),
        ("\udcff",),  # an argument that is not UTF-8
        ("x", "--target", "\udcff:1"),
        ("x", "--max-tokens", "-1"),
        ("x", "--seed", "-1"),
        ("x", "--nonsense"),
        (),
    ],
)
def test_what_cannot_be_sent_is_status_2(tandem: RunTandem, router: ScriptedRouter, arguments: tuple[str, ...]) -> None:
    result = tandem("generate", *arguments)
    assert result.status == 2
    assert result.err
    assert "Traceback" not in result.err
    assert router.requests == []


def test_stdin_that_is_not_text_is_one_line(tandem: RunTandem, router: ScriptedRouter) -> None:
    result = tandem("generate", "-", stdin=b"caf\xe9")
    assert (result.status, result.err.count("\n"), router.requests) == (2, 1, [])
    assert result.err.startswith("tandem: b'caf\\xe9': 'utf-8' codec can't decode")


def test_nothing_at_the_target_says_how_to_start_a_cluster(tandem: RunTandem, router: ScriptedRouter) -> None:
    router.close()
    result = tandem("generate", "x")
    assert result.status == 1
    assert result.err == f"tandem: nothing listens at {router.target}: start a cluster with `tandem serve`\n"
