"""libdsec: sandboxes of dsec from Python.

Asynchronous (``AsyncClient``) and plain (``Client``) with the same methods.

    from libdsec import Client

    with Client() as client, client.create("debian:12", memory="1GiB") as box:
        print(box.exec("uname -a", timeout=10).text)

Sizes are bytes, durations seconds, paths inside a sandbox absolute.
"""

from . import errors, network, phases, types
from ._client import AsyncClient, Creating
from ._files import AsyncFiles
from ._images import AsyncImages, AsyncTemplates
from ._layers import AsyncLayers
from ._port import AsyncPort
from ._process import AsyncOutputStream, AsyncProcess
from ._sandbox import AsyncSandbox
from ._screen import AsyncScreen, Screenshot
from ._session import AsyncSession
from ._sync import Client, Files, Images, Layers, OutputStream, Port, Process, Sandbox, Screen, Session, Templates, Watch
from ._watch import AsyncWatch
from .calls import Call, CallResult
from .errors import *  # noqa: F403
from .network import Egress, EgressRow, NetworkRule, NetworkState
from .phases import Phase, PhaseState
from .types import *  # noqa: F403

__version__ = "0.1.0"

__all__ = [
    "AsyncClient", "AsyncFiles", "AsyncImages", "AsyncLayers", "AsyncOutputStream", "AsyncPort", "AsyncProcess", "AsyncSandbox",
    "AsyncScreen", "AsyncSession", "AsyncTemplates", "AsyncWatch", "Call", "CallResult", "Client", "Creating", "Egress", "EgressRow", "Files", "Images", "Layers", "NetworkRule", "NetworkState", "OutputStream",
    "Phase", "PhaseState", "Port",
    "Process", "Sandbox", "Screen", "Screenshot", "Session", "Templates", "Watch",
    *errors.__all__, *types.__all__,
]
