"""A structure that cannot be compiled is refused at the door, with the request's own field."""

from __future__ import annotations

import threading

import pytest

from services.router.edge.input_processor import StructureCheck
from services.router.edge.settings import StructureSettings
from shared.errors import InvalidRequest, Overloaded
from shared.model.text.tokenizer import Tokenizer
from shared.structure import compiler as compiler_module
from shared.structure.compiler import StructureCompiler
from shared.structure.structured_output import StructuredOutput, StructureKind


class HastySettings(StructureSettings):
    """Ten milliseconds for a structure."""

    compile_timeout_ms = 10


def regex(text: str, source: str = "guided_regex") -> StructuredOutput:
    return StructuredOutput(StructureKind.REGEX, text, source=source)


@pytest.fixture
def compiler(tokenizer: Tokenizer) -> StructureCompiler:
    return StructureCompiler(lambda: tokenizer, (tokenizer.eos_token_id,))


async def test_each_request_reads_its_own_field(compiler: StructureCompiler) -> None:
    check = StructureCheck(compiler, StructureSettings())
    await check.check(None)
    await check.check(regex("a+"))
    for source in ("guided_regex", "structured_outputs.regex"):  # the second time from memory
        with pytest.raises(InvalidRequest, match="unclosed group") as refused:
            await check.check(regex("(a", source))
        assert refused.value.field == source
        assert refused.value.message.startswith(f"{source} cannot be compiled: ")


async def test_the_setting_bounds_its_bytes(compiler: StructureCompiler) -> None:
    check = StructureCheck(compiler, StructureSettings(max_bytes=256))
    await check.check(regex("ü" * 128))
    with pytest.raises(InvalidRequest) as refused:
        await check.check(regex("ü" * 128 + "a"))
    assert (refused.value.field, refused.value.details["limit"]) == ("guided_regex", 256)


async def test_a_request_waits_no_longer_than_the_limit(tokenizer: Tokenizer) -> None:
    release = threading.Event()

    def slow() -> Tokenizer:
        release.wait(60)
        return tokenizer

    compiler = StructureCompiler(slow, (tokenizer.eos_token_id,))
    check = StructureCheck(compiler, HastySettings())
    with pytest.raises(Overloaded, match="not compiled after 10 ms") as refused:
        await check.check(regex("a"))
    assert (refused.value.field, refused.value.details["limit"]) == ("guided_regex", 10)
    release.set()
    assert compiler.prepare(regex("a")).result(60) is not None  # it was compiled all the same
    await check.check(regex("a"))


async def test_too_many_that_wait_are_overload(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_PENDING", 1)
    release = threading.Event()

    def slow() -> Tokenizer:
        release.wait(60)
        return tokenizer

    compiler = StructureCompiler(slow, (tokenizer.eos_token_id,))
    waiting = compiler.prepare(regex("a"))
    with pytest.raises(Overloaded):
        await StructureCheck(compiler, StructureSettings()).check(regex("b"))
    release.set()
    waiting.result(60)
