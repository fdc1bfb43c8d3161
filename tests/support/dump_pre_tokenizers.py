"""Writes the token ids that llama.cpp gives difficult texts under each name of a pre-tokenizer: run
by hand, as `python -m tests.support.dump_pre_tokenizers LLAMA_TOKENIZE`, the path of llama.cpp's
program llama-tokenize (build 11434 made the committed file).

Each name gets a vocabulary of its own kind (`pair_vocabulary.py`) in a GGUF file without tensors.
Models that compose characters first get composed texts, since llama.cpp does not compose them.
Texts of the file's list are kept as ids, the many seeded ones as short digests.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import gguf

from octavo.text.pre_tokenization import PRE_TOKENIZATIONS
from tests.support.many_scripts import lines
from tests.support.pair_vocabulary import (
    BOS,
    DATA,
    NUM_LINES,
    SEPARATOR,
    digest_of,
    pair_vocabulary,
)

TEXTS = (
    *(
        "",
        " ",
        "  ",
        "   ",
        "\t",
        "\n",
        "\n\n",
        "\n\n\n",
        "\t\n",
        "\r\n",
        " \r\n \n\t \n",
        "\x0b\x0c",
    ),
    *("Hello", " Hello", "  Hello", "    Hello\n    Hello", "Hello, world!", " Hello World!"),
    *(
        "3",
        "33",
        "333",
        "3333",
        "33333",
        "333333",
        "3333333",
        "33333333",
        "333333333",
        "3333333333",
    ),
    *("w048 7tuijk dsdfhu", "this is 🦙.cpp", " (", "\n =", "' era", "!!!!!!", " discards"),
    *("ied 4 ½ months", "Äpfel", "нещо на Български", "កាន់តែពិសេសអាចខលចេញ", "Cửa Việt"),
    "🚀 (normal) 😶\u200d🌫️ (multiple emojis concatenated) ✅ (only emoji that has its own token)",
    "Hello, y'all! How are you 😁 ?我想在apple工作1314151天～",
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n🦙🦙 3 33 333 3333 33333 3.3 3..3 3...3 "
    "?我想在apple工作1314151天～ ------======= ''''''```````\"\"\"\"......!!!!!!?????? I've"
    " been 'told he's there, 'RE you sure? 'M not sure I'll make it, 'D you like some tea?"
    " We'Ve a'lL",
    "e\u0301 re\u0301sume\u0301 Vie\u0302\u0301t a\u0300\u0300\u0300 \u212b ﬁ",
    "helloWorld HTTPServer XMLHttpRequest iPhone McDonald's O'RE I'LL'S",
    "ÉCOLE École éCOLE ПРИВЕТ Привет приВет ΑΒΓ Αβγ ǅungla",
    "def f(x):\n    return [i**2 for i in range(x)]  # why?\n\n\tif a != b && !c || d --> e:\r\n",
    "<sentinel:12> IMGIMGABCZ [a]{b}(c)/d\\e^f~g`h_i$j+k=l|m",
    "12ab ab12 a 1,234.5 $99 1e-9 0x7F 2024-01-02T03:04:05Z v1.2.3",
    "٣٤٥ १२३ Ⅷ ½² ①②③ 1٢३4 12٣45",
    "日本語のテキスト、カタカナ。한국어 문장입니다 ไทยภาษา ຄົນລາວ မြန်မာ בעברית العربية ቋንቋ ქართული",
    "ㄅㄆㄇ 、。〈〉 ！？：；“quoted”‘x’… — 　全角　ＡＢＣ１２３ ｱｲｳ ⼀⼆ 㐀㐁 豈更 𠀀𪜀",
    "a\u00a0b\u2003c\u200bd\u200de\ufefff\u0085g\u2028h\u202fi\u3000j",
    "  two  spaces\n\n\nand lines \n x \t 12  34   56    a     b",
    "\x00\x01\x1b[0m\x7f \ufffd \U000e0041 \ue000",
    "https://x.org/a?b=1&c=%20#d me@channel.com #tag @user /usr/bin/env C:\\dir ../..",
    "word word's  word'S 'tis rock'n'roll don't DON'T it'll IT'LL we'd y'all've \u2019s",
)


def encode(program: str, pre: str, texts: Sequence[str]) -> list[list[int]]:
    """Returns llama.cpp's ids of each text."""
    vocabulary = pair_vocabulary(pre)
    with tempfile.TemporaryDirectory() as folder:
        model, prompt = Path(folder) / "vocabulary.gguf", Path(folder) / "prompt.txt"
        writer = gguf.GGUFWriter(model, "llama")
        for add in ("context_length", "embedding_length", "block_count", "feed_forward_length"):
            getattr(writer, f"add_{add}")(64)
        writer.add_head_count(1)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tokenizer_model(vocabulary.model)
        writer.add_tokenizer_pre(pre)
        writer.add_token_list([bytes(token) for token in vocabulary.tokens])
        writer.add_token_types(vocabulary.types)
        writer.add_token_merges([merge.decode() for merge in vocabulary.merges])
        writer.add_bos_token_id(vocabulary.tokens.index(BOS.encode()))
        writer.add_eos_token_id(vocabulary.tokens.index(BOS.encode()))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        prompt.write_bytes(SEPARATOR.join(texts).encode())
        options = ["--ids", "--no-bos", "--no-parse-special", "--no-escape", "--log-disable"]
        command = [program, "-m", str(model), "-f", str(prompt), *options]
        shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    parts: list[list[int]] = [[]]
    border = vocabulary.tokens.index(SEPARATOR.encode())
    for token_id in json.loads(shown):
        if token_id == border:
            parts.append([])
        else:
            parts[-1].append(token_id)
    assert len(parts) == len(texts), f"{pre}: {len(parts)} parts of {len(texts)} texts"
    return parts


def main(program: str) -> None:
    groups: dict[str, int] = {}
    names: dict[str, int] = {}
    for name, pre in PRE_TOKENIZATIONS.items():
        texts = [*TEXTS, *lines(NUM_LINES)]
        if pre.normalizer is not None:
            texts = [pre.normalizer().normalize_str(text) for text in texts]
        ids = encode(program, name, texts)
        known, seeded = ids[: len(TEXTS)], ids[len(TEXTS) :]
        found = json.dumps([known, "".join(map(digest_of, seeded))], separators=(",", ":"))
        names[name] = groups.setdefault(found, len(groups))
    rows = [f'"texts":{json.dumps(TEXTS)}', f'"names":{json.dumps(names)}']
    rows.append('"groups":[\n' + ",\n".join(groups) + "\n]")
    DATA.write_text("{" + ",\n".join(rows) + "}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
