"""A stand-in for a server of vLLM: TRL's protocol over HTTP, and a queue instead of NCCL."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from trl.generation import vllm_client, vllm_generation

INFO = {"weight_transfer_config": {}, "model_config": {"logprobs_mode": "processed_logprobs"}}


class Server:
    """Generates with a model that has the values it was sent.

    loads: the number of names in each call of `update_weights`, by update.  fails: refuse weights.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.sent: Queue[Tensor] = Queue()
        self.tensors: dict[str, Tensor] = {}
        self.loads: list[list[int]] = []
        self.fails = False

    def answer(self, path: str, body: Any) -> Any:
        """Return the answer to a request; None to refuse it."""
        if path == "/start_weight_update":
            self.loads.append([])
        if path == "/update_weights":
            return self._take(**body["update_info"])
        if path == "/v1/completions":
            rows = [prompt for prompt in body["prompt"] for _ in range(body["n"])]
            return {
                "choices": [self._choice(row, i, body["max_tokens"]) for i, row in enumerate(rows)]
            }
        answers = {"/v1/models": {"data": [{"id": "model"}]}, "/server_info": {"vllm_config": INFO}}
        return answers.get(path.partition("?")[0], {"success": True})

    def _take(self, names: list[str], dtype_names: list[str], shapes: list[list[int]]) -> Any:
        if self.fails:
            return None
        for name, dtype, shape in zip(names, dtype_names, shapes, strict=True):
            tensor = self.sent.get(timeout=60)
            assert (str(tensor.dtype), list(tensor.shape)) == (f"torch.{dtype}", shape), name
            self.tensors[name] = tensor.clone()
        self.loads[-1].append(len(names))
        return {}

    def _choice(self, prompt: list[int], i: int, length: int) -> dict[str, Any]:
        self.model.load_state_dict(self.tensors)
        tokens = [3 + (i * j + j) % 7 for j in range(length)]
        with torch.no_grad():
            logits = self.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        found = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
        named = [f"token_id:{token}" for token in tokens]
        told = {"tokens": named, "token_logprobs": found, "top_logprobs": [None] * length}
        return {"prompt_token_ids": prompt, "token_ids": tokens, "logprobs": told}


@contextmanager
def serve(server: Server) -> Iterator[str]:
    """Let a server answer; gives its address, which TRL's client in this process takes as one of vLLM."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = server.answer(self.path, body=self._body())
            self.send_response(200 if answer is not None else 400)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        do_POST = do_GET

        def _body(self) -> Any:
            return json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http, _without_vllm(server.sent):
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


@contextmanager
def _without_vllm(queue: Queue[Tensor]) -> Iterator[None]:
    """Replace what TRL imports from vLLM, and the group that it makes with NCCL."""

    def connect(client: Any, device: Any) -> None:
        client.communicator = queue

    def send(
        iterator: Iterator[Any],
        group: Queue[Tensor],
        src: int,
        post_iter_func: Callable[..., Tensor],
    ) -> None:
        for item in iterator:
            group.put(post_iter_func(item))

    there = {"is_vllm_available": lambda *args, **kwargs: True}
    sends = {"_HAS_STATEFUL_TRAINER_ENGINE": True, "packed_nccl_broadcast_producer": send}
    with (
        patch.multiple(vllm_generation, **there),
        patch.multiple(vllm_client, create=True, **there, **sends),
        patch.object(vllm_client.VLLMClient, "init_communicator", connect),
    ):
        yield
