"""What transformers' AutoTokenizer says about model folders; run in a process of its own.

Reads ``{"folders": [...], "texts": [...], "chats": [...]}`` from standard input and prints the
answers as JSON, so that the tests themselves import neither transformers nor torch.
"""

from __future__ import annotations

import json
import sys

from transformers import AutoTokenizer


def describe(folder: str, texts: list[str], chats: list[list[dict[str, str]]]) -> dict[str, object]:
    """Every answer of one folder's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return {
        "size": len(tokenizer),
        "encode": plain,
        "encode_prompt": [tokenizer(text)["input_ids"] for text in texts],
        "decode": [tokenizer.decode(ids, skip_special_tokens=True) for ids in plain],
        "chat": [
            [
                tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=flag)
                for flag in (False, True)
            ]
            for chat in (chats if tokenizer.chat_template else [])
        ],
        "chat_ids": [
            tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            for chat in (chats if tokenizer.chat_template else [])
        ],
    }


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    answers = {f: describe(f, asked["texts"], asked["chats"]) for f in asked["folders"]}
    sys.stdout.write(json.dumps(answers))
