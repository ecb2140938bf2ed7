"""Sends one prompt to the release and prints the answer; exit status 1 without one."""

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
    """Reads TANDEM_URL, TANDEM_MODEL, TANDEM_API_KEY and TANDEM_CA."""
    setting = os.environ.get
    try:
        answer = ask(
            os.environ["TANDEM_URL"],
            os.environ["TANDEM_MODEL"],
            setting("TANDEM_API_KEY", ""),
            setting("TANDEM_CA", ""),
        )
    except urllib.error.HTTPError as error:
        print(f"{error.code}: {error.read().decode(errors='replace')}")
        return 1
    except OSError as error:
        print(f"no answer: {error}")
        return 1
    tokens = answer["usage"]["completion_tokens"]
    print(f"{PROMPT}{answer['choices'][0]['text']} ({tokens} tokens)")
    return 0 if tokens > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
