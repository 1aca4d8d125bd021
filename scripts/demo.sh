#!/bin/sh
# The main job end to end on films that afire draws itself: no download, no GPU.
set -eu
out=$1
films=$2
epochs=$3

if [ -t 1 ]; then bold='\033[1m' plain='\033[0m'; else bold='' plain=''; fi   # no codes in a file
say() { printf "\n$bold%s$plain\n" "$1"; }

say "1. Draw $films digital phantom films, normal and with five of its fourteen findings: enough of each to learn from"
afire data phantom --count "$films" --size 224 --seed 0 --style digital --out "$out/phantom" \
  --findings Nodule,Consolidation,Effusion,Cardiomegaly,Pneumothorax
say "2. What is in them"
afire data stats --data "$out/phantom/manifest.parquet"
say "3. Audit: leaks, duplicates, inverted films, shortcuts"
afire data check --data "$out/phantom/manifest.parquet" --out "$out/audit"
say "4. Split by patient"
afire data split --data "$out/phantom/manifest.parquet" --out "$out/splits" --fractions 10,100
say "5. Pack: decode and resize once"
afire data pack --data "$out/phantom/manifest.parquet" --out "$out/pack" --size 128
say "6. Lesions drawn on normal films, as pre-training sees them"
afire lesions preview --data "$out/phantom/manifest.parquet" --size 224 --out "$out/lesions.png"
say "7. Out of the box: the detector that comes with afire, on scanned films of another seed; it was taught by drawn chests alone"
afire data phantom --count 120 --size 224 --seed 1 --style scanned --out "$out/new" --findings Consolidation,Effusion,Mass,Edema
afire detect run "$out/new/images" --out "$out/detect-builtin" --force
afire detect eval --model builtin --data "$out/new" --protocol all --out "$out/eval-builtin" --name "built in" --force
say "8. Adapted: it learns from the normal training films too, and is calibrated on held-out ones"
if [ ! -e "$out/detector/detector.json" ]; then
  afire detect fit --data "$out/pack" --split "$out/splits/split.json" --out "$out/detector" \
    --set train.epochs=2 --set taught.films=400 --set false_alarms=0.1
fi
afire detect run "$out/new/images" --model "$out/detector" --out "$out/detect" --force
afire detect eval --model "$out/detector" --data "$out/new" --protocol all --out "$out/eval-adapted" --name adapted --force
say "9. Pre-train AFiRe's tiny preset on the normal training films"
if [ -e "$out/run/config.yaml" ]; then resume=--resume; else resume=; fi
# shellcheck disable=SC2086  # empty or one word
afire pretrain --data "$out/pack" --split "$out/splits/split.json" --out "$out/run" --preset tiny --set image.size=128 \
  --set training.epochs="$epochs" --set run.picture_epochs="$epochs" $resume
say "10. What representations are worth: random weights, this pre-training (a tiny network and minutes: do not expect much)
    and the network of the built-in detector"
afire probe --weights random --preset tiny --set image.size=128 --data "$out/pack" \
  --split "$out/splits/split.json" --out "$out/probe-random" --force --quiet
afire probe --weights "$out/run" --data "$out/pack" --split "$out/splits/split.json" --out "$out/probe" --force
afire probe --weights builtin --data "$out/pack" --split "$out/splits/split.json" --out "$out/probe-builtin" --force --quiet
afire compare "$out/probe-random" "$out/probe" "$out/probe-builtin"
say "11. The detectors side by side"
afire compare "$out/eval-builtin" "$out/eval-adapted"
say "12. In short: AUC, and how often the hottest point lies in the finding"
"$(dirname "$(command -v afire)")/python" scripts/demo_result.py "$out"
say "Done. Look at:"
printf '  %s\n' "$out/result.png" "$out/phantom/contact_sheet.png" "$out/lesions.png" "$out/run/pictures" "$out/probe/result.md" \
  "$out/audit/audit.html" "$out/detect-builtin/report.html" "$out/detect/report.html"
