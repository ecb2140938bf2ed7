"""Settings of traces, by Tandem's names and by OpenTelemetry's."""

from __future__ import annotations

import pytest

from services.kvstore.settings import KVStoreSettings
from services.router.settings import RouterSettings
from shared.config import load_settings
from shared.errors import ConfigError

ROUTER = ["--model", "m"]
URL = "http://collector:4317"


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    import os

    for name in os.environ:
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


def test_the_standard_variables_set_them_too(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", URL)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20x")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.25")
    traces = load_settings(RouterSettings, ROUTER).traces
    assert (traces.endpoint, traces.sample, traces.follow_client) == (URL, 0.25, True)
    assert traces.headers.get_secret_value() == "authorization=Bearer%20x"
    store = load_settings(KVStoreSettings, []).traces
    assert (store.endpoint, hasattr(store, "sample")) == (URL, False)


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        ("always_on", (1.0, False)),
        ("always_off", (0.0, False)),
        ("parentbased_always_on", (1.0, True)),
        ("traceidratio", (1.0, False)),
        ("xray", (0.0, True)),
    ],
)
def test_each_sampler_has_its_meaning(monkeypatch, sampler, expected):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    traces = load_settings(RouterSettings, ROUTER).traces
    assert (traces.sample, traces.follow_client) == expected


def test_tandem_s_own_names_come_first_one_by_one(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://other:4317")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    monkeypatch.setenv("TANDEM_ROUTER_TRACES__ENDPOINT", URL)
    traces = load_settings(RouterSettings, [*ROUTER, "--traces.slow-ttft-s", "2"]).traces
    assert (traces.endpoint, traces.sample, traces.slow_ttft_s) == (URL, 1.0, 2.0)


@pytest.mark.parametrize(("name", "value"), [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")])
def test_the_standard_variables_can_switch_themselves_off(monkeypatch, name, value):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", URL)
    monkeypatch.setenv(name, value)
    assert load_settings(RouterSettings, ROUTER).traces.endpoint == ""


@pytest.mark.parametrize(
    ("endpoint", "protocol", "is_http"),
    [
        (URL, "auto", False),
        ("http://c:4318", "auto", True),
        ("https://c/otlp/v1/traces", "auto", True),
        ("http://c:4318", "grpc", False),
        (URL, "http/protobuf", True),
    ],
)
def test_the_protocol_is_guessed_from_the_url_unless_it_is_said(endpoint, protocol, is_http):
    traces = load_settings(RouterSettings, [*ROUTER, f"--traces.endpoint={endpoint}", f"--traces.protocol={protocol}"])
    assert traces.traces.speaks_http == is_http


@pytest.mark.parametrize("protocol", ["http/protobuf", ""])
def test_traces_have_a_path_of_their_own_below_the_endpoint_of_all_signals(monkeypatch, protocol):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:80/otlp/")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    assert load_settings(RouterSettings, ROUTER).traces.endpoint == "http://c:80/otlp/v1/traces"


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc", ""])
def test_an_endpoint_of_all_signals_that_is_no_url_is_refused_by_its_name(monkeypatch, protocol):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://[::1/otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    with pytest.raises(ConfigError) as found:
        load_settings(RouterSettings, ROUTER)
    assert found.value.field == "traces.endpoint"


@pytest.mark.parametrize(
    ("flag", "value"), [("endpoint", "collector:4317"), ("endpoint", "http://c:x"), ("sample", "1.5"), ("headers", "x")]
)
def test_a_bad_value_is_refused_by_its_name(flag, value):
    with pytest.raises(ConfigError) as found:
        load_settings(RouterSettings, [*ROUTER, f"--traces.{flag}", value])
    assert found.value.field == f"traces.{flag}"
