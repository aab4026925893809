"""From the record of a draft that needs no model to what proposes it."""

from batcher.models.base import Tokenizer
from batcher.speculation.datastore import Datastore
from batcher.speculation.drafter import Drafter
from batcher.speculation.lookup import LookupDrafter
from batcher.speculation.ngram import NgramDrafter
from batcher.speculation.spec import LookupDraft, NgramDraft, SuffixDraft, TextDraft
from batcher.speculation.suffix import SuffixDrafter
from batcher.speculation.texts import read_texts


def make_text_drafter(
    draft: TextDraft, tokenizer: Tokenizer, vocab_size: int | None, num_branches: int = 1
) -> Drafter:
    """Return the Drafter that `draft` is the record of.

    tokenizer, vocab_size: those of the model that is to verify its drafts.
    num_branches: of the trees that it proposes; 1: they are lines.

    Raises:
        BatchdecodeError: the file of a LookupDraft cannot be read, or not as texts.
    """
    match draft:
        case NgramDraft(max_length):
            return NgramDrafter(max_length, num_branches)
        case SuffixDraft():
            return SuffixDrafter(num_branches)
        case LookupDraft(path):
            return LookupDrafter(Datastore(read_texts(path, tokenizer, vocab_size)), num_branches)
