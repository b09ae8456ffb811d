# docker build -t fczoo .                                     CPU
# docker build -t fczoo --build-arg TORCH=cu128 .             CUDA 12.8; run with --gpus all
# docker run --rm -v "$PWD/work:/work" fczoo bench --methods fedncm,hgp
FROM python:3.12-slim

ARG TORCH=cpu
ARG EXTRAS=plot,pandas,tune

COPY . /source
RUN pip install --no-cache-dir --extra-index-url "https://download.pytorch.org/whl/${TORCH}" "/source[${EXTRAS}]" \
    && rm -r /source

RUN useradd --create-home fczoo && mkdir /work && chown fczoo /work
USER fczoo
WORKDIR /work
ENTRYPOINT ["fczoo"]
CMD ["--help"]
