"""A small random BERT with its tokenizer, for tests of what reads encoders."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import BertProcessing
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,:;!?'\"<>/@#-_=|"


def save_encoder(folder: Path, *, words: Iterable[str] = (), layers: int = 2, seed: int = 5) -> Path:
    """Letters as pieces, and `words` whole; width 32."""
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *LETTERS, *(f"##{c}" for c in LETTERS), *words]
    model = WordPiece({piece: at for at, piece in enumerate(vocab)}, unk_token="[UNK]", max_input_chars_per_word=400)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer, tokenizer.pre_tokenizer = BertNormalizer(), BertPreTokenizer()
    tokenizer.post_processor = BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = BertConfig(
            vocab_size=len(vocab),
            hidden_size=32,
            num_hidden_layers=layers,
            num_attention_heads=2,
            intermediate_size=48,
            max_position_embeddings=512,
        )
        bert = BertModel(config)
        with torch.no_grad():  # what a piece is weighs more than where it stands, as in a trained model
            bert.embeddings.position_embeddings.weight.mul_(0.1)
        bert.save_pretrained(folder)
    return folder
