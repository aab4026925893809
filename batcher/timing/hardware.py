"""Data sheets: what a GPU computes, reads and keeps, and the links by which it reaches others."""

from msgspec import Struct

from batcher.timing import catalog
from batcher.timing.catalog import CatalogError

FILE_SUFFIXES = (".yaml", ".yml", ".json")


class GPU(Struct, frozen=True, kw_only=True):
    """A data sheet: dense bfloat16 operations in 10^12/s, bandwidth in 10^9 B/s, memory in 10^9 B.

    Dense: without sparsity; with sums in float32.  fp8_tflops: those on 8 bits, None if it has none
    faster.  link: a name of links.yaml, or a file like it.
    """

    tflops: catalog.Positive
    bandwidth_gb_s: catalog.Positive
    memory_gb: catalog.Positive
    fp8_tflops: catalog.OptionalPositive = None
    link: catalog.OptionalText = None
    source: catalog.Text = "not stated"


class Link(Struct, frozen=True, kw_only=True):
    """What joins the GPUs of a host, in 10^9 B/s for each of them, one way.

    bandwidth_gb_s: on the data sheet.  latency_us: the least that an all-reduce takes on two GPUs.
    peer_us: what each GPU beyond these adds to it.
    """

    bandwidth_gb_s: catalog.Positive
    latency_us: catalog.Positive
    peer_us: catalog.Amount = 0.0
    source: catalog.Text = "not stated"

    def seconds(self, num_gpus: int) -> float:
        """Return what an all-reduce of next to nothing takes."""
        return (self.latency_us + self.peer_us * (num_gpus - 2)) / 1e6


def bytes_sent(num_gpus: int) -> float:
    """Return what each GPU sends for each byte that all reduce together.

    It is that of a ring, in which all is scattered and then gathered (Patarasuk and Yuan 2009).
    """
    return 2 * (num_gpus - 1) / num_gpus


def load_gpu(text: str) -> GPU:
    """Return the data sheet that `text` names: a shipped one, or a YAML file with one.

    Raises:
        CatalogError: there is none.
    """
    if text.endswith(FILE_SUFFIXES):
        return catalog.as_record(catalog.read_mapping(text), GPU, text)
    values = catalog.find(text, catalog.shipped("hardware.yaml"), "GPU")
    return catalog.as_record(values, GPU, f"hardware.yaml: {text}")


def link_of(gpu: GPU) -> Link:
    """Return the link by which GPUs like this share work.

    Raises:
        CatalogError: its data sheet names none, or one that there is not.
    """
    known = catalog.shipped("links.yaml")
    if gpu.link is None:
        raise CatalogError(
            "GPUs that share work need a link on their data sheet, a file or one of "
            + ", ".join(known)
        )
    if gpu.link.endswith(FILE_SUFFIXES):
        return catalog.as_record(catalog.read_mapping(gpu.link), Link, gpu.link)
    return catalog.as_record(catalog.find(gpu.link, known, "link"), Link, f"links.yaml: {gpu.link}")
