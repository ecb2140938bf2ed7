"""The part of a model's `config.json` that says how its weights are quantized, as each tool writes it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import translate

from shared.kernels.linear_spec import Kind
from shared.model.config.json_fields import JsonFields
from shared.model.config.quantization import (
    ALL_LINEAR,
    FIELD,
    MX_GROUP,
    NVFP4_GROUP,
    PATTERN,
    Floats4,
    Method,
    QuantizationConfig,
    WeightScheme,
)

_PLAIN = "dense"
_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized", _PLAIN,
)  # fmt: skip
_STRATEGIES = ("tensor", "channel", "group", "block")
_WITH, _WITHOUT = "+:", "-:"
"""How GPTQModel begins a pattern of layers stored otherwise, and of plain ones."""


def parse_quantization(fields: JsonFields) -> QuantizationConfig | None:
    """None where the weights are stored as they are. `fields`: of the whole file.

    Raises:
        ModelLoadError: an unknown method, or one with parameters that no reader knows; `field` names it.
    """
    own = fields.child(FIELD) or fields.child("compression_config")
    if own is None:
        return None
    method = own.text("quant_method", default="compressed-tensors" if "config_groups" in own else None)
    if method not in _PARSERS:
        raise own.fault("quant_method", f"{method!r} is not supported; supported: {', '.join(_PARSERS)}")
    return _PARSERS[method](own)


def _check_patterns(fields: JsonFields, name: str, targets: Iterable[str]) -> None:
    for target in targets:
        if target.startswith(PATTERN):
            try:
                re.compile(target.removeprefix(PATTERN))
            except re.error as error:
                raise fields.fault(name, f"has {target!r}, which is no regular expression: {error}") from None


def _compressed_tensors(fields: JsonFields) -> QuantizationConfig | None:
    name = _check_format(fields)
    if (sparsity := fields.child("sparsity_config")) is not None and sparsity.text("format", "dense") != "dense":
        raise fields.fault("sparsity_config", "is not supported: publish the weights dense")
    if (transforms := fields.child("transform_config")) is not None and transforms.names:
        raise fields.fault("transform_config", "is not supported: weights that are rotated need rotated inputs")
    groups = fields.child("config_groups")
    if groups is None or not groups.names:
        if name == _PLAIN:  # of the cache alone, which is kept as the worker says
            return None
        raise fields.fault("config_groups", "is missing")
    schemes = []
    for name in groups.names:
        group = groups.child(name)
        if group is None:
            raise groups.fault(name, "must be an object, found null")
        _check_format(group)
        targets = tuple(group.optional_text_list("targets") or ())
        _check_patterns(group, "targets", targets)
        weights = group.child("weights")
        if weights is None:
            raise group.fault("weights", "is missing")
        scheme = _compressed_scheme(weights)
        rounds = scheme.kind != "fp8" and not scheme.floats4 and _rounds_input(group.child("input_activations"))
        schemes.append((targets, replace(scheme, rounds_input=rounds)))
    ignored = tuple(fields.optional_text_list("ignore") or ())
    _check_patterns(fields, "ignore", ignored)
    return QuantizationConfig("compressed-tensors", tuple(schemes), ignored)


def _check_format(fields: JsonFields) -> str:
    name = fields.text("format", default=_FORMATS[0])
    if name not in (*_FORMATS, "mixed-precision"):
        raise fields.fault("format", f"{name!r} is not supported; supported: {', '.join(_FORMATS)}")
    return name


def _compressed_scheme(fields: JsonFields) -> WeightScheme:
    bits, kind_of = fields.integer("num_bits", default=8), fields.text("type", default="int")
    kinds: dict[tuple[str, int], Kind] = {("int", 4): "int4", ("int", 8): "int8", ("float", 8): "fp8"}
    if (kind_of, bits) == ("float", 4):
        return _floats4(fields)
    if (kind_of, bits) not in kinds:
        known = "int 4, int 8, float 4, float 8"
        raise fields.fault("num_bits", f"{bits} of type {kind_of} is not supported; supported: {known}")
    kind = kinds[kind_of, bits]
    size = fields.integer("group_size", default=-1, minimum=-1)
    strategy = fields.text("strategy", default="group" if size > 0 else "tensor")
    if strategy not in _STRATEGIES:
        raise fields.fault("strategy", f"{strategy!r} is not supported; supported: {', '.join(_STRATEGIES)}")
    if strategy == "group" and size < 1:
        raise fields.fault("group_size", f"must be at least 1 with strategy group, found {size}")
    block_rows = 0
    if strategy == "block":
        block_rows, size = _block(fields, "block_structure")
    return WeightScheme(
        kind,
        size if strategy in ("group", "block") else 0,
        has_zeros=not fields.boolean("symmetric", default=True) and kind != "fp8",
        is_ordered=fields.raw("actorder") in _ORDERED,
        block_rows=block_rows,
    )


_ORDERED = ("group", "dynamic", True)
"""Values of `actorder` that are stored as an index; with others, codes lie as without."""
_FLOATS4: Mapping[str, tuple[Floats4, int]] = {"tensor_group": ("nvfp4", NVFP4_GROUP), "group": ("mxfp4", MX_GROUP)}
"""Strategy → what it is with floats of 4 bits, and the columns that share a scale."""


def _floats4(fields: JsonFields) -> WeightScheme:
    strategy = fields.text("strategy", default="tensor_group")
    if strategy not in _FLOATS4:
        raise fields.fault("strategy", f"{strategy!r} is not supported with float 4; supported: {', '.join(_FLOATS4)}")
    name, group = _FLOATS4[strategy]
    if (size := fields.integer("group_size", default=group)) != group:
        raise fields.fault("group_size", f"{size} is not supported with float 4 by {strategy}; supported: {group}")
    return WeightScheme("int4", group, floats4=name)


def _rounds_input(fields: JsonFields | None) -> bool:
    """Whether activations are rounded to int8 as they come, a scale a token. What is rounded in another way is computed
    in 16 or 32 bits."""
    if fields is None:
        return False
    form = (fields.text("type", default="int"), fields.integer("num_bits", default=8), fields.text("strategy", "token"))
    is_symmetric, is_dynamic = fields.boolean("symmetric", default=True), fields.boolean("dynamic", default=False)
    return form == ("int", 8, "token") and is_symmetric and is_dynamic


def _block(fields: JsonFields, name: str) -> tuple[int, int]:
    """Rows and columns, as a list or, as earlier releases of compressed-tensors spelled it, `128x128`."""
    found = fields.raw(name)
    if isinstance(found, str) and re.fullmatch(r"[0-9]{1,9}x[0-9]{1,9}", found):
        sizes: tuple[int, ...] = tuple(map(int, found.split("x")))
    else:
        sizes = fields.indices(name)
    if len(sizes) != 2 or not all(sizes):
        raise fields.fault(name, f"must be two sizes above zero, found {list(sizes)}")
    return sizes[0], sizes[1]


def _bits(fields: JsonFields, allowed: Mapping[int, Kind]) -> Kind:
    bits = fields.integer("bits" if fields.has("bits") else "w_bit")
    if bits not in allowed:
        raise fields.fault("bits", f"{bits} is not supported; supported: {', '.join(map(str, allowed))}")
    return allowed[bits]


def _version(fields: JsonFields, *names: str, known: tuple[str, ...]) -> str:
    """By the first of `names` that is there; the first of `known` where none is."""
    name = next((name for name in names if fields.has(name)), names[0])
    version = fields.text(name, default=known[0]).lower()
    if version not in known:
        raise fields.fault(name, f"{version!r} is not supported; supported: {', '.join(known)}")
    return version


def _group_size(fields: JsonFields) -> int:
    name = "group_size" if fields.has("group_size") else "q_group_size"
    size = fields.integer(name, default=128, minimum=-1)
    if size == 0:
        raise fields.fault(name, "must be -1 or at least 1, found 0")
    return max(0, size)


def _awq(fields: JsonFields) -> QuantizationConfig:
    kind = _bits(fields, {4: "int4"})
    _version(fields, "version", "checkpoint_format", "format", known=("gemm",))
    scheme = WeightScheme(kind, _group_size(fields), has_zeros=True)
    ignored = tuple(fields.optional_text_list("modules_to_not_convert") or ())
    return QuantizationConfig("awq", (((ALL_LINEAR,), scheme),), ignored)


def _gptq(fields: JsonFields) -> QuantizationConfig:
    version = _version(fields, "checkpoint_format", "format", known=("gptq", "gptq_v2"))
    schemes = (*_gptq_exceptions(fields), ((ALL_LINEAR,), _gptq_scheme(fields)))
    return QuantizationConfig("gptq", schemes, zeros_offset=int(version == "gptq"))


def _gptq_scheme(fields: JsonFields) -> WeightScheme:
    kind = _bits(fields, {4: "int4", 8: "int8"})
    is_ordered = fields.boolean("desc_act", default=False)
    return WeightScheme(kind, _group_size(fields), has_zeros=True, is_ordered=is_ordered)


def _gptq_exceptions(fields: JsonFields) -> Iterator[tuple[tuple[str], WeightScheme]]:
    """Layers that GPTQModel stored otherwise (`dynamic`), by patterns, of which the first that matches counts. Those
    that it left plain need no scheme."""
    if (exceptions := fields.child("dynamic")) is None:
        return
    for pattern in exceptions.names:
        own = exceptions.child(pattern)
        if own is None or pattern.startswith(_WITHOUT):
            continue
        target = PATTERN + pattern.removeprefix(_WITH)
        _check_patterns(fields, "dynamic", (target,))
        yield (target,), _gptq_scheme(own.with_defaults(fields, ("bits", "group_size", "desc_act")))


def _fp8(fields: JsonFields) -> QuantizationConfig:
    name = fields.text("fmt", default="e4m3")
    if name != "e4m3":
        raise fields.fault("fmt", f"{name!r} is not supported; supported: e4m3")
    block = _block(fields, "weight_block_size") if fields.has("weight_block_size") else (0, 0)
    ignored = (
        *(fields.optional_text_list("modules_to_not_convert") or ()),
        *(fields.optional_text_list("ignored_layers") or ()),
    )
    scheme = WeightScheme("fp8", block[1], block_rows=block[0])
    return QuantizationConfig("fp8", (((ALL_LINEAR,), scheme),), ignored)


def _bitsandbytes(fields: JsonFields) -> QuantizationConfig:
    if not fields.boolean("load_in_4bit", default=False):
        raise fields.fault("load_in_4bit", "must be true: other weights of bitsandbytes are not supported")
    kind = fields.text("bnb_4bit_quant_type", default="fp4")
    if kind not in ("nf4", "fp4"):
        raise fields.fault("bnb_4bit_quant_type", f"{kind!r} is not supported; supported: nf4, fp4")
    ignored = tuple(fields.optional_text_list("llm_int8_skip_modules") or ())
    return QuantizationConfig("bitsandbytes", (((ALL_LINEAR,), WeightScheme("int4", 0)),), ignored)


_AUTO_ROUND: Mapping[str, tuple[Method, int]] = {
    "auto_round:auto_gptq": ("gptq", 1),
    "auto_round": ("gptq", 0),
    "auto_round:gptqmodel": ("gptq", 0),
    "auto_round:auto_awq": ("awq", 0),
}
"""Whose layout it is, and what is added to a stored zero, by `packing_format`."""
_PLAIN_BITS = 16
"""Bits from which on a layer is not stored in fewer."""


def _auto_round(fields: JsonFields) -> QuantizationConfig:
    """Of Intel's AutoRound, which stores codes as others do, and names layers that differ, or patterns of them."""
    packing = fields.text("packing_format", default="auto_round:auto_gptq")
    if packing not in _AUTO_ROUND:
        raise fields.fault("packing_format", f"{packing!r} is not supported; supported: {', '.join(_AUTO_ROUND)}")
    method, offset = _AUTO_ROUND[packing]
    kinds: Mapping[int, Kind] = {4: "int4"} if method == "awq" else {4: "int4", 8: "int8"}
    schemes = []
    exceptions = fields.child("extra_config")
    layers = [] if exceptions is None else [(name, exceptions.child(name)) for name in exceptions.names]
    for name, own in layers:
        if own is None or own.integer("bits", default=0, minimum=0) >= _PLAIN_BITS:
            continue
        target = name if re.fullmatch(r"[\w.]+", name) else f"{PATTERN}{name}"
        _check_patterns(fields, "extra_config", (target,))
        schemes.append(((target,), _auto_round_scheme(own.with_defaults(fields, ("bits", "group_size")), kinds)))
    schemes.append(((ALL_LINEAR,), _auto_round_scheme(fields, kinds)))
    return QuantizationConfig(method, tuple(schemes), zeros_offset=offset)


def _auto_round_scheme(fields: JsonFields, kinds: Mapping[int, Kind]) -> WeightScheme:
    if (data_type := fields.text("data_type", default="int")) != "int":
        raise fields.fault("data_type", f"{data_type!r} is not supported; supported: int")
    return WeightScheme(_bits(fields, kinds), _group_size(fields), has_zeros=True)


_MODELOPT: Mapping[str, WeightScheme] = {
    "FP8": WeightScheme("fp8", 0),
    "FP8_PER_CHANNEL_PER_TOKEN": WeightScheme("fp8", 0),
    "NVFP4": WeightScheme("int4", NVFP4_GROUP, floats4="nvfp4"),
    "W4A16_NVFP4": WeightScheme("int4", NVFP4_GROUP, floats4="nvfp4"),
}
"""By `quant_algo`. Factors of inputs are read of none of them."""
_MODELOPT_MIXED = "MIXED_PRECISION"


def _modelopt(fields: JsonFields) -> QuantizationConfig | None:
    """Of NVIDIA's Model Optimizer: one algorithm for all layers but those left out, or one by the layer's name."""
    if not fields.has("quant_algo"):  # of the cache alone, which is kept as the worker says
        return None
    schemes: tuple[tuple[tuple[str, ...], WeightScheme], ...]
    if fields.text("quant_algo") != _MODELOPT_MIXED:
        schemes = (((ALL_LINEAR,), _modelopt_scheme(fields)),)
    elif (layers := fields.child("quantized_layers")) is None:
        raise fields.fault("quantized_layers", f"is missing: quant_algo is {_MODELOPT_MIXED}")
    else:
        own = ((name, layers.child(name)) for name in layers.names)
        schemes = tuple(((name,), _modelopt_scheme(layer)) for name, layer in own if layer is not None)
    left = fields.optional_text_list("ignore" if "ignore" in fields else "exclude_modules") or ()
    return QuantizationConfig("modelopt", schemes, tuple(map(_by_wildcard, left)))


def _modelopt_scheme(fields: JsonFields) -> WeightScheme:
    name = fields.text("quant_algo")
    if name not in _MODELOPT:
        known = ", ".join((*_MODELOPT, _MODELOPT_MIXED))
        raise fields.fault("quant_algo", f"{name!r} is not supported; supported: {known}")
    scheme = _MODELOPT[name]
    if scheme.group and (size := fields.integer("group_size", default=scheme.group)) != scheme.group:
        raise fields.fault("group_size", f"{size} is not supported with {name}; supported: {scheme.group}")
    return scheme


def _fbgemm_fp8(fields: JsonFields) -> QuantizationConfig:
    """Of Meta's FP8 releases: a scale a row; the bound of inputs (`activation_scale_ub`) is not used."""
    ignored = tuple(fields.optional_text_list("modules_to_not_convert") or ())
    return QuantizationConfig("fp8", (((ALL_LINEAR,), WeightScheme("fp8", 0)),), ignored)


_QUARK_SCHEMES: Mapping[tuple[str, str], WeightScheme] = {
    ("fp8_e4m3", "per_tensor"): WeightScheme("fp8", 0),
    ("fp8_e4m3", "per_channel"): WeightScheme("fp8", 0),
    ("int8", "per_tensor"): WeightScheme("int8", 0),
    ("int8", "per_channel"): WeightScheme("int8", 0),
    ("fp4", "per_group"): WeightScheme("int4", MX_GROUP, floats4="mxfp4"),
}
"""By `dtype` and `qscheme` of weights."""


def _quark(fields: JsonFields) -> QuantizationConfig:
    """Of AMD's Quark: one way for all layers but those left out, and others by the layer's name."""
    layers = fields.child("layer_quant_config")
    named = () if layers is None else tuple((name, layers.child(name)) for name in layers.names)
    schemes = [((_by_wildcard(name),), _quark_scheme(own)) for name, own in named if own is not None]
    of_types = fields.child("layer_type_quant_config")
    if of_types is not None and of_types.names:
        raise fields.fault("layer_type_quant_config", "is not supported: name the layers in layer_quant_config")
    if (of_all := fields.child("global_quant_config")) is None:
        raise fields.fault("global_quant_config", "is missing")
    schemes.append(((ALL_LINEAR,), _quark_scheme(of_all)))
    ignored = tuple(map(_by_wildcard, fields.optional_text_list("exclude") or ()))
    _check_patterns(fields, "exclude", ignored)
    return QuantizationConfig("quark", tuple(schemes), ignored)


def _quark_scheme(fields: JsonFields) -> WeightScheme:
    if (weight := fields.child("weight")) is None:
        raise fields.fault("weight", "is missing")
    kind, by = weight.text("dtype"), weight.text("qscheme")
    if (kind, by) == ("fp8_e4m3", "per_block"):
        block = _block(weight, "block_size")
        return WeightScheme("fp8", block[1], block_rows=block[0])
    if (kind, by) not in _QUARK_SCHEMES:
        known = ", ".join(" ".join(each) for each in (*_QUARK_SCHEMES, ("fp8_e4m3", "per_block")))
        raise weight.fault("dtype", f"{kind} {by} is not supported; supported: {known}")
    scheme = _QUARK_SCHEMES[kind, by]
    if scheme.group and (size := weight.integer("group_size", default=scheme.group)) != scheme.group:
        raise weight.fault("group_size", f"{size} is not supported with {kind}; supported: {scheme.group}")
    if scheme.group and (name := weight.text("scale_format", default="e8m0")) != "e8m0":
        raise weight.fault("scale_format", f"{name!r} is not supported with {kind}; supported: e8m0")
    if kind == "int8" and weight.raw("symmetric") is False:
        raise weight.fault("symmetric", "must be true with int8")
    return scheme


def _by_wildcard(name: str) -> str:
    """A name in which `*` stands for anything, as a target."""
    return f"{PATTERN}{translate(name)}" if "*" in name and not name.startswith(PATTERN) else name


_PARSERS: Mapping[str, Callable[[JsonFields], QuantizationConfig | None]] = {
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "mxfp4": lambda _: QuantizationConfig("mxfp4", ()),  # of experts alone; what is not converted is stored plain
    "bitsandbytes": _bitsandbytes,
    "modelopt": _modelopt,
    "auto-round": _auto_round,
    "fbgemm_fp8": _fbgemm_fp8,
    "quark": _quark,
}
"""By `quant_method`."""
