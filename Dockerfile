# afire in a container:
#
#   docker build --tag afire .
#   docker run --rm --volume "$PWD:/films" afire data build folder --root FILMS --out films.parquet
#
# TORCH_INDEX is the package index that torch comes from, as torch's own installation page names it: one for the CPU
# makes a small image, one for a CUDA version an image for its GPUs (run with `--gpus all --ipc host`). Without it pip
# takes its default, which on x86-64 brings CUDA's libraries and runs on a CPU as well.
#
#   docker build --tag afire:cuda --build-arg TORCH_INDEX=INDEX --build-arg EXTRAS=[dicom,mlflow] .
ARG PYTHON=3.12
FROM python:${PYTHON}-slim

ARG TORCH_INDEX=
ARG EXTRAS=

WORKDIR /afire
COPY constraints.txt ./
RUN python -m pip install --no-cache-dir --constraint constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
COPY pyproject.toml README.md LICENSE ./
COPY afire ./afire
RUN python -m pip install --no-cache-dir --constraint constraints.txt ".${EXTRAS}" && afire --help > /dev/null

# Films and runs are mounted here; whoever runs the container owns what it writes (`--user "$(id -u):$(id -g)"`).
RUN useradd --create-home films && mkdir /films && chown films /films
USER films
WORKDIR /films
ENTRYPOINT ["afire"]
CMD ["--help"]
