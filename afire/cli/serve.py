"""`afire serve`: films from a PACS in, results of a detector back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from afire.cli.options import Device, Quiet, Verbose

PASSWORD, KEY_PASSWORD = "AFIRE_SEND_PASSWORD", "AFIRE_TLS_KEY_PASSWORD"
SEND_KEY_PASSWORD = "AFIRE_SEND_KEY_PASSWORD"


def serve(
    model: Annotated[Path, typer.Option("--model", help="The folder of a detector, from `afire detect fit`.")],
    spool: Annotated[Path, typer.Option("--spool", help="Folder for films and results on their way; keep it private.")],
    allow: Annotated[list[str], typer.Option("--allow", help="Who may send films: AET@HOST. Repeat for more.")],
    send: Annotated[
        str, typer.Option("--send", help="Where results go: dicomweb:URL, dimse:AET@HOST:PORT or dimse+tls:...")
    ],
    aet: Annotated[str, typer.Option("--aet", help="Our AE title.")] = "AFIRE",
    port: Annotated[int, typer.Option("--port", help="Port for films (DICOM).", min=0, max=65535)] = 11112,
    bind: Annotated[str, typer.Option("--bind", help="Address to listen on.")] = "127.0.0.1",
    objects: Annotated[str, typer.Option("--objects", help="What to send, of sc, sr, seg, gsps.")] = "sc,sr",
    min_free: Annotated[
        str, typer.Option("--min-free", help="Disk space to leave; below it films are refused.")
    ] = "5GB",
    health_port: Annotated[
        int | None, typer.Option("--health-port", help="Port for /healthz, /readyz, /metrics.", min=0, max=65535)
    ] = None,
    live: Annotated[
        int, typer.Option("--live", help="Films of the live list at --health-port, on loopback; 0 is no list.", min=0)
    ] = 200,
    health_bind: Annotated[str, typer.Option("--health-bind", help="Address of --health-port.")] = "127.0.0.1",
    tls_cert: Annotated[
        Path | None, typer.Option("--tls-cert", help="Our certificate (PEM): films by TLS only.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="Its key (PEM).")] = None,
    tls_key_password_file: Annotated[
        Path | None,
        typer.Option("--tls-key-password-file", help=f"Its password; or {KEY_PASSWORD} in the environment."),
    ] = None,
    tls_ca: Annotated[
        Path | None, typer.Option("--tls-ca", help="Certificates (PEM) that callers must show one of.")
    ] = None,
    send_ca: Annotated[Path | None, typer.Option("--send-ca", help="Certificates (PEM) that vouch for --send.")] = None,
    send_cert: Annotated[
        Path | None, typer.Option("--send-cert", help="Certificate (PEM) to show to --send; default: --tls-cert.")
    ] = None,
    send_key: Annotated[Path | None, typer.Option("--send-key", help="Its key (PEM).")] = None,
    send_key_password_file: Annotated[
        Path | None,
        typer.Option("--send-key-password-file", help=f"Its password; or {SEND_KEY_PASSWORD} in the environment."),
    ] = None,
    send_user: Annotated[str, typer.Option("--send-user", help="User name for dicomweb.")] = "",
    send_password_file: Annotated[
        Path | None, typer.Option("--send-password-file", help=f"Its password; or {PASSWORD} in the environment.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow plain connections beyond this machine.")] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Try what is in failed/ of the spool once more.")
    ] = False,
    drain: Annotated[float, typer.Option("--drain", help="Seconds to finish what waits after SIGTERM.", min=0)] = 25.0,
    batch: Annotated[int, typer.Option(help="Films that the networks look at together, at most.", min=1)] = 32,
    workers: Annotated[int | None, typer.Option(help="Threads that score; default: the cores.", min=1)] = None,
    device: Device = "auto",
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Score films that a PACS sends, and send the results back to it, until SIGTERM.

    Example: [cyan]afire serve --model detector --spool spool --allow ORTHANC@127.0.0.1 --send dicomweb:http://127.0.0.1:8042/dicom-web[/cyan]

    Films are acknowledged when they are safe on disk; a killed service goes on where it stopped.
    """
    from afire.pacs import require_packages

    require_packages("afire serve")
    from afire.detect.base import detector_folder, load_detector
    from afire.detect.run import detector_hash
    from afire.pacs import connections, service
    from afire.pacs.objects import parse_kinds
    from afire.pacs.receive import ReceiveSettings
    from afire.weights import pick_device

    destination = connections.parse_destination(send)
    key_password = connections.read_password(tls_key_password_file, KEY_PASSWORD)
    certificate = connections.certificate_of(tls_cert, tls_key, key_password)
    send_key_password = connections.read_password(send_key_password_file, SEND_KEY_PASSWORD)
    send_certificate = connections.certificate_of(send_cert, send_key, send_key_password, "--send") or certificate
    credentials = connections.Credentials(
        send_user, connections.read_password(send_password_file, PASSWORD), send_ca, send_certificate
    )
    if destination.tls:
        credentials.context()  # a mistake in it is reported before anything starts
    if not insecure:
        connections.require_secure(bind, "--bind", is_tls=certificate is not None)
        connections.require_secure(destination.host, "--send", is_tls=destination.tls)
        connections.require_secure(health_bind, "--health-bind", is_tls=False)
    settings = service.ServiceSettings(
        spool=spool,
        receive=ReceiveSettings(
            title=connections.parse_title(aet, "--aet"),
            host=bind,
            port=port,
            callers=[connections.parse_caller(text) for text in allow],
            min_free=connections.parse_size(min_free),
            tls=connections.server_context(certificate, tls_ca),
        ),
        destination=destination,
        credentials=credentials,
        kinds=parse_kinds(objects, "--objects"),
        health=(health_bind, health_port) if health_port is not None else None,
        live=live,
        batch=batch,
        workers=workers,
        drain_seconds=drain,
        retry_failed=retry_failed,
    )
    folder = detector_folder(model)
    detector = load_detector(folder).to(pick_device(device))
    raise typer.Exit(service.serve(settings, detector, detector_hash(folder)))
