"""A real Kubernetes control plane on this machine: etcd, kube-apiserver and kube-controller-manager."""

from __future__ import annotations

import json
import secrets
import signal
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from shared.parent_death import command_dying_with_parent
from tests.k8s.programs import find
from tests.tls_files import Authority

START_TIMEOUT_S = 240.0  # 8 s on a quiet machine
STOP_TIMEOUT_S = 30.0


class ApiServer:
    """Listens on 127.0.0.1 with RBAC and without a watch cache, so that `compact` makes old watches end with 410.

    All methods block; from a coroutine call them by `asyncio.to_thread`. The address, certificates, tokens and content
    stay the same over `stop` and `start`.
    """

    def __init__(self, folder: Path) -> None:
        """All files, logs too, lie in `folder`. Starts nothing; raises Missing where a program is not there."""
        self._folder = folder
        self._programs = {name: find(name) for name in ("etcd", "kube-apiserver", "kube-controller-manager")}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        # The kernel ties the children's death signal to the thread that started them; callers' threads come and go.
        self._starter = ThreadPoolExecutor(1, "api-server")
        self._etcd, self._etcd_peers, port, self._manager_port = _free_ports(4)
        self.host, self.port = "127.0.0.1", port
        self.url = f"https://{self.host}:{port}"
        authority = Authority(folder)
        self.ca = authority.cert
        """File of the authority that signed the server's certificate."""
        self._cert, self._key = authority.issue("kube-apiserver")
        self._accounts_cert, self._accounts_key = authority.issue("service-accounts")
        self.admin_token = secrets.token_hex(16)
        """May do everything."""
        self.kubeconfig = self.write_kubeconfig("admin", self.admin_token)
        """File for kubectl, helm and clients, with the admin's token."""
        (folder / "tokens.csv").write_text(f'{self.admin_token},admin,admin,"system:masters"\n')
        self._trust = ssl.create_default_context(cafile=str(self.ca))

    def __enter__(self) -> ApiServer:
        """Starts all three."""
        try:
            self._run_etcd()
            self.start()
            self.start_controllers()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all three."""
        for name in ("kube-controller-manager", "kube-apiserver", "etcd"):
            self._end(name, signal.SIGKILL)
        self._starter.shutdown()

    def start(self) -> None:
        """Runs the API server until it is ready."""
        self._run(
            "kube-apiserver",
            etcd_servers=f"http://127.0.0.1:{self._etcd}",
            bind_address=self.host,
            advertise_address="10.0.0.1",  # a loopback address is refused
            endpoint_reconciler_type="none",
            secure_port=self.port,
            tls_cert_file=self._cert,
            tls_private_key_file=self._key,
            service_account_issuer="https://kubernetes.default.svc",
            service_account_key_file=self._accounts_cert,
            service_account_signing_key_file=self._accounts_key,
            api_audiences="https://kubernetes.default.svc",
            token_auth_file=self._folder / "tokens.csv",
            authorization_mode="RBAC",
            disable_admission_plugins="ServiceAccount",  # Pods bring no token volume of their own
            allow_privileged="true",
            service_cluster_ip_range="10.96.0.0/16",
            watch_cache="false",
            shutdown_delay_duration="0s",
        )
        # RBAC's own roles and the namespaces are written after the start.
        self._until("kube-apiserver", self._is_ready)

    def stop(self) -> None:
        """Kills the API server: all watches break. The content stays in etcd."""
        self._end("kube-apiserver", signal.SIGKILL)

    def restart(self) -> None:
        """`stop` and `start`."""
        self.stop()
        self.start()

    def start_controllers(self) -> None:
        """Runs the controller manager: Deployments, StatefulSets, Jobs, Endpoints, ServiceAccounts, garbage."""
        self._run(
            "kube-controller-manager",
            kubeconfig=self.kubeconfig,
            # Nobody renews this node's Lease, provisions its disks or routes to it.
            controllers="*,-nodelifecycle,-nodeipam,-attachdetach,-persistentvolume-binder,-persistentvolume-expander,"
            "-ttl,-route,-service,-cloud-node-lifecycle",
            service_account_private_key_file=self._accounts_key,
            root_ca_file=self.ca,
            leader_elect="false",
            port=0,  # plain HTTP, which 1.24 and later do not have: leave the flag out there
            secure_port=self._manager_port,
            bind_address=self.host,
            kube_api_qps=200,
            kube_api_burst=400,
        )

    def compact(self) -> None:
        """Forgets all versions before now: who watches or pages from an older one gets 410 Expired."""
        for _ in range(2):  # who has seen all would still be served at the version just after
            answer = self._ask_etcd("kv/put", key="Y29tcGFjdA==", value="")
        self._ask_etcd("kv/compaction", revision=answer["header"]["revision"], physical=True)

    def token_for(self, namespace: str, service_account: str) -> str:
        """A token of the service account for an hour, as its Pods get one. Raises urllib's HTTPError."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{service_account}/token"
        spec = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
        token: str = self.request("POST", path, spec)["status"]["token"]
        return token

    def request(self, method: str, path: str, body: object = None, *, token: str = "") -> Any:
        """One call, by default as the admin: the answer's JSON. Raises urllib's HTTPError."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        request = urllib.request.Request(
            self.url + path,
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {token or self.admin_token}", "Content-Type": kind},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=START_TIMEOUT_S, context=self._trust) as answer:
            return json.load(answer)

    def write_kubeconfig(self, name: str, token: str, namespace: str = "default") -> Path:
        """A kubeconfig file of the user with this token."""
        path = self._folder / f"{name}.kubeconfig"
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": name, "namespace": namespace}}],
            "clusters": [{"name": "test", "cluster": {"server": self.url, "certificate-authority": str(self.ca)}}],
            "users": [{"name": name, "user": {"token": token}}],
        }
        path.write_text(yaml.safe_dump(content))
        return path

    def log_tail(self, name: str) -> str:
        """The last lines that a program logged."""
        lines = (self._folder / f"{name}.log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-15:])

    def _run_etcd(self) -> None:
        client, peer = (f"http://127.0.0.1:{port}" for port in (self._etcd, self._etcd_peers))
        self._run(
            "etcd",
            data_dir=self._folder / "etcd",
            listen_client_urls=client,
            advertise_client_urls=client,
            listen_peer_urls=peer,
            initial_advertise_peer_urls=peer,
            initial_cluster=f"default={peer}",
            # Compiling of others takes all processors at times: no election because of that.
            heartbeat_interval=1000,
            election_timeout=20000,
            initial_election_tick_advance="true",
            logger="zap",
            log_level="warn",
        )
        self._until("etcd", self._etcd_answers)

    def _run(self, name: str, **flags: object) -> None:
        given = [f"--{flag.replace('_', '-')}={value}" for flag, value in flags.items()]
        command = command_dying_with_parent([str(self._programs[name]), *given])
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = self._starter.submit(
                subprocess.Popen, command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            ).result()

    def _end(self, name: str, how: signal.Signals) -> None:
        if (process := self._processes.pop(name, None)) is not None:
            process.send_signal(how)
            process.wait(STOP_TIMEOUT_S)

    def _until(self, name: str, answers: Callable[[], bool]) -> None:
        """Waits until it answers; raises AssertionError with the end of its log where it ends or does not."""
        end_s = time.monotonic() + START_TIMEOUT_S
        while not answers():
            status = self._processes[name].poll()
            assert status is None, f"{name} ended with status {status}:\n{self.log_tail(name)}"
            assert time.monotonic() < end_s, f"{name} does not get ready:\n{self.log_tail(name)}"
            time.sleep(0.05)

    def _etcd_answers(self) -> bool:
        try:
            self._ask_etcd("kv/range", key="AA==")
        except OSError:
            return False
        return True

    def _is_ready(self) -> bool:
        request = urllib.request.Request(f"{self.url}/readyz", headers={"Authorization": f"Bearer {self.admin_token}"})
        try:
            with urllib.request.urlopen(request, timeout=5, context=self._trust):
                return bool(self.request("GET", "/api/v1/namespaces/default"))
        except OSError:
            return False

    def _ask_etcd(self, method: str, **body: object) -> Any:
        request = urllib.request.Request(f"http://127.0.0.1:{self._etcd}/v3/{method}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
