"""Sends a prompt to each model of the release and prints the answers; exit status 1 where one does not come."""

import json
import os
import ssl
import sys
import urllib.error
import urllib.request

PROMPT = "The two of them pulled"
TIMEOUT_S = 120


def ask(url: str, model: str, key: str, ca: str) -> dict:
    """The answer of POST /v1/completions. Raises OSError."""
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps({"model": model, "prompt": PROMPT, "max_tokens": 16, "temperature": 0}).encode(),
        {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})},
    )
    context = ssl.create_default_context(cafile=ca) if ca else None
    with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as answer:
        return json.load(answer)


def main() -> int:
    """Reads TANDEM_URL, TANDEM_MODELS, TANDEM_API_KEY and TANDEM_CA."""
    return 1 if [model for model in json.loads(os.environ["TANDEM_MODELS"]) if not answers(model)] else 0


def answers(model: str) -> bool:
    """Whether the model gave at least a token."""
    setting = os.environ.get
    try:
        answer = ask(os.environ["TANDEM_URL"], model, setting("TANDEM_API_KEY", ""), setting("TANDEM_CA", ""))
    except urllib.error.HTTPError as error:
        print(f"{model}: {error.code}: {error.read().decode(errors='replace')}")
        return False
    except OSError as error:
        print(f"{model}: no answer: {error}")
        return False
    tokens = answer["usage"]["completion_tokens"]
    print(f"{model}: {PROMPT}{answer['choices'][0]['text']} ({tokens} tokens)")
    return tokens > 0


if __name__ == "__main__":
    sys.exit(main())
