"""A process that speaks the event protocol and behaves as its arguments say: `fake_service.py NAME JOURNAL BEHAVIOUR`.

What happens to it goes to the journal file, one "NAME start" or "NAME stop" a line. It needs the standard library only.
"""

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time

name, journal, behaviour = sys.argv[1:4]


def note(what: str) -> None:
    with open(journal, "a") as file:
        file.write(f"{name} {what}\n")


def emit(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def on_term(*_: object) -> None:
    note("stop")
    if not behaviour.startswith("stubborn"):
        sys.exit(0)


class Readyz(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        ready = behaviour != "router without workers"
        body = json.dumps({"ready": ready, "reason": "" if ready else "no decode worker"}).encode()
        self.send_response(200 if ready else 503)
        self.end_headers()
        self.wfile.write(body)
        if behaviour == "router that dies":
            threading.Timer(0.2, os._exit, [4]).start()

    def log_message(self, *_: object) -> None:
        pass


signal.signal(signal.SIGTERM, on_term)
signal.signal(signal.SIGINT, on_term)
note("start")
with open(f"{journal}.pids", "a") as file:
    file.write(f"{name} {os.getpid()}\n")
with open(journal) as file:
    num_starts = file.read().splitlines().count(f"{name} start")
if behaviour.endswith("starts once") and num_starts > 1:
    emit(event="error", kind="ConfigError", message="the port is taken", field="bind")
    sys.exit(2)
if behaviour == "refuses":
    emit(event="error", kind="ModelLoadError", message="config.json has no model_type", field="model")
    sys.exit(2)
if behaviour == "dies":
    for i in range(20):
        print(f"log line {i}", file=sys.stderr)
    sys.exit(3)
if behaviour == "noisy":
    print("a library says hello", flush=True)
    print("x" * 2_000_000, flush=True)
if behaviour == "leaves a child":
    subprocess.Popen(["/bin/sleep", "60"])
if behaviour.startswith("router") or behaviour == "stubborn router":
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Readyz)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    emit(event="ready", address="127.0.0.1:1", http=f"127.0.0.1:{server.server_port}", grpc="127.0.0.1:2")
elif behaviour != "never ready":
    emit(event="progress", fraction=0.5, text="loading weights")
    emit(event="ready", address=f"127.0.0.1:{os.getpid()}")
if behaviour == "answers":
    for line in sys.stdin:
        request = json.loads(line)
        if "kind" in request:
            emit(event="error", message="no such request", **request)
        elif "status" in request:
            sys.exit(request["status"])
        else:
            emit(event="answer", value=[os.environ["GREETING"], request])
while True:
    time.sleep(0.05)  # a signal that reaches another thread wakes this one no earlier
