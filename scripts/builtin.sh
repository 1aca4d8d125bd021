#!/bin/sh
# Remakes afire/builtin, the detector that comes with the package: drawn films alone, no patient's. A quarter of an hour on two
# idle cores. Numbers follow from the seeds; another machine may differ in the last bits of the weights.
set -eu
work=${1:-builtin-work}
[ -e "$work/films/manifest.parquet" ] || afire data phantom --count 2400 --size 128 --seed 1900 --out "$work/films"
afire data pack --data "$work/films" --out "$work/pack" --size 128
if [ -e "$work/detector/adapt/config.yaml" ]; then resume=--resume; else resume=; fi
# shellcheck disable=SC2086  # empty or one word
afire detect fit --method taught --data "$work/pack" --out "$work/detector" --seed 19 $resume \
  --set taught.start=nothing --set taught.films=8000 --set taught.normal_share=0.2 --set taught.pasted=0 \
  --set train.epochs=120 --set train.learning_rate=2e-3 --set train.warmup_epochs=3 --set train.precision=bf16 \
  --set false_alarms=0.1
mkdir -p afire/builtin
# MODEL_CARD.md is written by hand: its numbers are measured, not made here.
for file in config.yaml model.safetensors detector.safetensors detector.json atlas.safetensors films.txt; do
  cp "$work/detector/$file" afire/builtin/
done
du -sh afire/builtin
