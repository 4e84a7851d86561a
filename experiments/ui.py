"""The MLflow UI, served on 127.0.0.1 for as long as somebody looks at it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import webbrowser
from pathlib import Path

from experiments.errors import InputError


def serve(target: str, home: Path, port: int, *, open_browser: bool) -> int:
    """Serve the MLflow UI on 127.0.0.1 until it is stopped.

    Returns:
        the server's exit code.

    Raises:
        InputError: the port is taken.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise InputError(f"--port {port}: cannot be used ({error.strerror}); give another") from None
    command = [sys.executable, "-m", "mlflow", "ui", "--host", "127.0.0.1", "--port", str(port), "--backend-store-uri", target]
    command += ["--default-artifact-root", (home / "artifacts").resolve().as_uri(), "--workers", "1"]
    # It has children, which must end with it; what it says is no output of ours.
    server = subprocess.Popen(command, start_new_session=True, stdout=sys.stderr)
    address = f"http://127.0.0.1:{port}"
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        while server.poll() is None and not _answers(port):
            time.sleep(0.1)
        if server.poll() is None:
            print(f"MLflow UI: {address} (Ctrl-C ends it)", flush=True)
            if open_browser:
                webbrowser.open(address)
        return server.wait()
    except KeyboardInterrupt:
        return 130
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0
