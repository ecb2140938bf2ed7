"""Every structured answer is what its structure says, however its steps are run, on whichever worker it continues."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from services.router.edge.answer.tool_use import ToolUse
from services.router.edge.http.openai.forced_calls import calls_structure
from services.router.edge.http.openai.schemas import FunctionTool, Tool
from shared.engine.finish_reason import FinishReason
from shared.engine.messages import AddSequence, StepOutput
from shared.engine.runner.runner import RunnerConfig
from shared.errors import InvalidRequest
from shared.model.families.registry import load_config
from shared.model.text.tokenizer import Tokenizer
from shared.structure.compiler import StructureCompiler
from shared.structure.structured_output import ReasoningPart, StructuredOutput, StructureKind
from tests.demo import DEMO
from tests.integration.engine.engine_run import EngineRun, hand_off
from tests.random_schemas import random_schema

MAX_TOKENS = 500
UNIFORM = {"temperature": 100.0}
"""Every token that a mask leaves is about as likely as every other: no model is worse at following a structure."""

WORDS = {"type": "array", "items": {"type": "string", "minLength": 3, "maxLength": 9}, "minItems": 12, "maxItems": 15}
NUMBERS = {
    "type": "array",
    "items": {"type": "integer", "minimum": 100, "maximum": 9999},
    "minItems": 20,
    "maxItems": 25,
}
TO_COMMA = ReasoningPart("(", ",", is_open=True)
"""What the demo model thinks before its first comma, which it soon writes."""
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
WAYS = [
    ({"temperature": 0.0}, StructuredOutput(StructureKind.JSON_SCHEMA, json.dumps(NUMBERS | COMPACT))),
    (
        {"temperature": 0.9, "seed": 3, "logprobs": 2},
        StructuredOutput(StructureKind.JSON_SCHEMA, json.dumps(WORDS), reasoning=TO_COMMA),
    ),
    (
        {"seed": 5, "repetition_penalty": 1.4, **UNIFORM},
        StructuredOutput(StructureKind.REGEX, "([a-z]{9}-[0-9]{9},){9}"),
    ),
    ({"seed": 8, "min_tokens": 6, **UNIFORM}, StructuredOutput(StructureKind.CHOICE, choices=("yes", "no, never"))),
    ({"seed": 2**63, "top_k": 40}, None),
]


def schema(value: dict) -> StructuredOutput:
    return StructuredOutput(StructureKind.JSON_SCHEMA, json.dumps(value))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO)


@pytest.fixture(scope="module")
def start(tokenizer):
    """Engines over the demo model, closed at the end."""
    runs: list[EngineRun] = []
    config = load_config(DEMO)

    def begin(**settings) -> EngineRun:
        structures = StructureCompiler(lambda: tokenizer, config.eos_token_ids, config.vocab_size)
        settings = {"num_blocks": 400, "config": RunnerConfig(max_num_seqs=40), **settings}
        runs.append(EngineRun(DEMO, structures=structures, eos=frozenset(config.eos_token_ids), **settings))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


@pytest.fixture(scope="module")
def run(start) -> EngineRun:
    return start()


def answers(run: EngineRun, prompts, ways, max_tokens=MAX_TOKENS):
    """(token ids, finish reason) of prompts that run together, each its own way."""
    sequences = [
        run.sequence(prompt, max_tokens, structured_output=structure, **sampling)
        for prompt, (sampling, structure) in zip(prompts, ways, strict=True)
    ]
    for item in sequences:
        run.engine.submit(AddSequence(item))
    found = {item.sequence_id: [] for item in sequences}
    ends: dict[str, FinishReason] = {}
    while len(ends) < len(found):
        for token in run.next(StepOutput).tokens:
            found[token.sequence_id].append(token.token.token_id)
            if token.finish_reason:
                ends[token.sequence_id] = token.finish_reason
    return [(found[name], ends[name]) for name in found]


def check_schemas(run: EngineRun, tokenizer: Tokenizer, seeds: range) -> None:
    schemas = [random_schema(seed) for seed in seeds]
    ways = [({"seed": seed, **UNIFORM}, schema(value)) for seed, value in zip(seeds, schemas, strict=True)]
    for value, (tokens, end) in zip(schemas, answers(run, [[5, 6, 7]] * len(ways), ways), strict=True):
        assert end is FinishReason.STOP
        text = tokenizer.decode(tokens)
        jsonschema.Draft202012Validator(value).validate(json.loads(text))


def test_answers_to_random_schemas_are_valid(run, tokenizer):
    check_schemas(run, tokenizer, range(32))


@pytest.mark.slow
@pytest.mark.parametrize("begin", range(0, 1000, 40))
def test_answers_to_a_thousand_schemas_are_valid(run, tokenizer, begin):
    check_schemas(run, tokenizer, range(begin, begin + 40))


LENGTH = 50
PROMPTS = [[5 + (i * k) % 200 for i in range(9 + 4 * k)] for k in range(1, 6)]


@pytest.fixture(scope="module")
def plain(start):
    return answers(start(kernels="torch", ahead=False), PROMPTS, WAYS, LENGTH)


@pytest.mark.parametrize(
    ("static", "ahead", "num_blocks"),
    [
        pytest.param(False, True, 400, marks=pytest.mark.slow),
        pytest.param(True, False, 12, marks=pytest.mark.slow),
        (False, True, 12),
        (True, True, 12),
    ],
)
def test_every_way_to_run_steps_gives_the_same_answers(start, plain, static, ahead, num_blocks):
    """12 blocks: sequences are preempted in mid-answer, and computed again."""
    config = RunnerConfig(max_num_seqs=5, max_seq_len=256, static_decode=static, warm_up=static)
    run = start(kernels="torch", config=config, ahead=ahead, num_blocks=num_blocks)
    assert answers(run, PROMPTS, WAYS, LENGTH) == plain
    assert (run.scheduler.counters.num_preemptions > 0) == (num_blocks == 12)
    run.scheduler.check_integrity()


def test_answers_alone_are_those_of_the_batch(run, start, plain):
    alone = start(kernels="torch", ahead=False)
    assert [answers(alone, [prompt], [way], LENGTH)[0] for prompt, way in zip(PROMPTS, WAYS, strict=True)] == plain


def test_a_handed_over_answer_goes_on_exactly(start, plain):
    prefill, decode = start(kernels="torch", ahead=False), start(kernels="torch", ahead=True)
    for prompt, (sampling, structure), (expected, _) in zip(PROMPTS[:3], WAYS, plain, strict=False):
        assert hand_off(prefill, decode, prompt, LENGTH, structured_output=structure, **sampling) == expected


def test_a_lost_answer_goes_on_exactly(start, plain):
    """As after a worker's death: prompt and what the client has, on an engine that never saw the answer."""
    run = start(kernels="torch", ahead=True)
    for num_kept, prompt, (sampling, structure), (expected, _) in zip((30, 1, 7), PROMPTS, WAYS, plain, strict=False):
        kept = expected[:num_kept]
        assert [*kept, *run.continued(prompt, kept, LENGTH, structured_output=structure, **sampling)] == expected


def test_a_structure_ends_the_answer_and_max_tokens_cuts_it(run, tokenizer, plain):
    yes = StructuredOutput(StructureKind.CHOICE, choices=("yes",))
    for sampling in ({}, {"ignore_eos": True}, {"min_tokens": 50}):
        ((tokens, end),) = answers(run, [[5]], [(sampling, yes)])
        assert (tokenizer.decode(tokens), end) == ("yes", FinishReason.STOP)
    endless = StructuredOutput(StructureKind.REGEX, "(ab)+")
    ((tokens, end),) = answers(run, [[5]], [({"min_tokens": 20}, endless)], 20)
    assert (len(tokens), end) == (20, FinishReason.LENGTH)
    assert set(tokenizer.decode(tokens)) == {"a", "b"}


def test_an_answer_of_allowed_tokens_ends_by_itself_only_where_an_end_token_is_allowed(run, tokenizer):
    allowed = StructuredOutput(StructureKind.ALLOWED_TOKENS, "40-59,300,2000-2100")
    names = {*range(40, 60), 300, *range(2000, 2101)}
    for sampling in ({}, {"temperature": 1.0, "seed": 3}, {"min_tokens": 5, "top_k": 3, "seed": 1}):
        ((tokens, end),) = answers(run, [[5, 6]], [(sampling, allowed)], 20)
        assert (len(tokens), end) == (20, FinishReason.LENGTH)
        assert set(tokens) <= names
    ending = StructuredOutput(StructureKind.ALLOWED_TOKENS, f"{tokenizer.eos_token_id}")
    ((tokens, end),) = answers(run, [[5, 6]], [({}, ending)], 20)
    assert (tokenizer.decode(tokens, skip_special_tokens=True), end) == ("", FinishReason.STOP)


def test_a_structure_holds_behind_reasoning_and_not_before(run, tokenizer):
    number = StructuredOutput(StructureKind.REGEX, "[0-9]{3}", reasoning=TO_COMMA)
    prompts = [tokenizer.encode(text) for text in ("In the beginning", "And God said", "Noah went")]
    for tokens, end in answers(run, prompts, [({"temperature": 0.0}, number)] * 3):
        thought, found = tokenizer.decode(tokens).split(",")
        assert any(character.isalpha() for character in thought)
        assert (len(found.strip()), found.strip().isdecimal(), end) == (3, True, FinishReason.STOP)


def test_logprobs_are_of_the_unmodified_logits(run):
    """So the chosen token may be less likely than all that are listed."""
    prompt = [5, 6, 7]
    sequence = run.sequence(prompt, 1, logprobs=3)
    run.engine.submit(AddSequence(sequence))
    (free,) = run.next(StepOutput).tokens
    choices = StructuredOutput(StructureKind.CHOICE, choices=("zebra",))
    sequence = run.sequence(prompt, 1, logprobs=3, structured_output=choices)
    run.engine.submit(AddSequence(sequence))
    (held,) = run.next(StepOutput).tokens
    assert held.token.top == free.token.top
    assert held.token.logprob < min(logprob for _, logprob in held.token.top)


def test_an_answer_that_cannot_go_on_fails_alone(run, tokenizer):
    """As where a client resumes with tokens that the structure does not allow."""
    yes = StructuredOutput(StructureKind.CHOICE, choices=("yes",))
    good, bad = run.sequence([5], 9, structured_output=yes), run.sequence([5], 9, kept=[6], structured_output=yes)
    run.engine.submit(AddSequence(good))
    run.engine.submit(AddSequence(bad))
    with pytest.raises(InvalidRequest, match="structured_output cannot be followed beyond token 2"):
        run.collect([bad.sequence_id])
    assert tokenizer.decode(run.generate([5], max_tokens=9, structured_output=yes)[0]) == "yes"


BOOK = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 40},
        "year": {"type": "integer"},
        "languages": {"type": "array", "items": {"enum": ["en", "fr", "de"]}, "maxItems": 3},
        "read": {"type": "boolean"},
    },
    "required": ["title", "year", "languages", "read"],
    "additionalProperties": False,
}
ADD_BOOK = Tool(type="function", function=FunctionTool(name="add_book", parameters=BOOK))
REQUIRED = ToolUse(frozenset(("add_book",)), required=True, max_calls=1)


@pytest.mark.parametrize(
    "structure", [schema(BOOK), calls_structure([ADD_BOOK], REQUIRED)], ids=["response_format", "required tool"]
)
def test_a_weak_models_answer_ends_within_120_tokens(run, tokenizer, structure):
    prompt = tokenizer.encode("Tell me about a book that you have read.")
    ways = [({"temperature": 1.0, "seed": seed}, structure) for seed in range(20)]
    for tokens, end in answers(run, [prompt] * len(ways), ways, max_tokens=120):
        text = tokenizer.decode(tokens)
        assert end is FinishReason.STOP, text
        found = json.loads(text)
        book = found[0]["parameters"] if isinstance(found, list) else found
        jsonschema.Draft202012Validator(BOOK).validate(book)
        assert abs(book["year"]) <= 10**18


def test_any_object_has_no_two_blanks_outside_its_strings(run, tokenizer):
    """The demo model's strings are verses, so that its objects need not end; their tokens must be content."""
    prompt = tokenizer.encode("Tell me about a book that you have read.")
    ways = [({"temperature": 1.0, "seed": seed}, StructuredOutput(StructureKind.JSON_OBJECT)) for seed in range(20)]
    for tokens, _ in answers(run, [prompt] * len(ways), ways, max_tokens=120):
        text = tokenizer.decode(tokens)
        outside = re.sub(r'"(?:[^"\\]|\\.)*("|$)', "s", text)
        assert not re.search(r"\s\s|\d{21}", outside), text
