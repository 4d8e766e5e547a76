#!/bin/sh
# A GPT-2-shaped model and a smaller one that writes ahead of it, both trained here: what guessing gains with 1 to 8
# guesses a step, over 100 prompts of 50 tokens each, as a table and a plot.
#
#     tests/bench/gpt2.sh QUERN TEXT FOLDER [FLAGS of quern bench spec]
#
# TEXT is WikiText-2's test split (wiki.test.raw) or another text of a megabyte or more, in UTF-8. FOLDER takes the two
# checkpoints, their .qrn files, prompts.txt and speed.svg; what is there already is not trained again. Python with torch,
# transformers and tokenizers (PYTHON names it) trains for about ten minutes on one core; see models/train_gpt2.py.
set -eu
[ $# -ge 3 ] || { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }
quern=$1 text=$2 folder=$3
shift 3
here=$(dirname "$0")
[ -e "$folder/losses.json" ] || "${PYTHON:-python3}" "$here/../../models/train_gpt2.py" "$text" "$folder"
for model in target draft; do
    "$quern" convert "$folder/$model" --out "$folder/$model.qrn" --force
done
"$quern" bench spec "$folder/target.qrn" --draft "$folder/draft.qrn" --prompts "$folder/prompts.txt" --count 100 \
    --prompt-tokens 64 -n 50 --methods draft,ngram -k 1,2,3,4,5,6,7,8,0 --plot "$folder/speed.svg" "$@"
