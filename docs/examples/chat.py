"""Chats with a cluster by OpenAI's own package: a stream, then an answer parsed into a class.

pip install openai && python chat.py [http://127.0.0.1:8000]
"""

import os
import sys

from openai import OpenAI
from pydantic import BaseModel


class Thing(BaseModel):
    """What the model is to name."""

    name: str
    large: bool


url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("TANDEM_API_KEY", "none"))
model = client.models.list().data[0].id

question = {"role": "user", "content": "Tell me about Noah."}
for chunk in client.chat.completions.create(model=model, messages=[question], max_tokens=32, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()

answer = client.chat.completions.parse(model=model, messages=[question], max_tokens=400, response_format=Thing)
print(repr(answer.choices[0].message.parsed))
