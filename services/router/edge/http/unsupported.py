"""Fields of OpenAI's and vLLM's APIs that we know and do not honour: refused by name, never dropped.

A value that asks for nothing beyond our behaviour (null, or one listed here) passes. Fields that appear
nowhere in these APIs are ignored, as OpenAI-compatible servers do; so are pure hints such as `user`.
"""

from __future__ import annotations

from collections.abc import Mapping

from shared.errors import InvalidRequest

_COMMON: Mapping[str, tuple[object, ...]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "priority": (0,),
    "prompt_logprobs": (),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structural_tag": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}

COMPLETION_FIELDS: Mapping[str, tuple[object, ...]] = {
    **_COMMON,
    "add_special_tokens": (True,),
    "prompt_embeds": (),
    "suffix": ("",),
}

CHAT_FIELDS: Mapping[str, tuple[object, ...]] = {
    **_COMMON,
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "metadata": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),  # says how tools are called, and there are none
    "prediction": (),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}

MESSAGE_FIELDS: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "function_call": (),
    "reasoning": (),
    "reasoning_content": (),
    "refusal": (),
    "thinking": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}

STREAM_OPTION_FIELDS: Mapping[str, tuple[object, ...]] = {
    "include_obfuscation": (False,),
}


def refuse_unsupported(
    given: Mapping[str, object] | None, known: Mapping[str, tuple[object, ...]], prefix: str = ""
) -> None:
    """Raises InvalidRequest naming the first field of `given` that asks for something we cannot do."""
    for name, value in (given or {}).items():
        if value is None or name not in known:
            continue
        if not any(type(value) is type(harmless) and value == harmless for harmless in known[name]):
            field = prefix + name
            raise InvalidRequest(f"{field} is not supported here", field=field)
