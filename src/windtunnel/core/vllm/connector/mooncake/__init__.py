"""The Mooncake connector: what is held, what is pulled, who is answered.

Checked against the source of vLLM 0.33.0 (`kv_connector/v1/mooncake/mooncake_connector.py`, read 2026-11-30; not run: it needs
GPUs). What it does there and here:

* The router makes up a `transfer_id` for both legs, which come at once or one after the other. A prefill answers no parameters.
* A decode allocates, and asks the prefill (`Pulls`) to write into its blocks. The prefill writes when its own request has ended
  by length, and answers; whichever comes first waits for the other.
* A prefill request that ends otherwise (a stop string, an abort) is forgotten. Nobody tells the decode: it waits until the
  prefill's patience is over (`VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`, 480 s), as does one that asks after the blocks have gone.
* A prefill serves `2 * num_workers` pulls at a time, those included that wait. Further ones stand in a queue behind them.
* Blocks are held by their transfer's id. A second request with the same id (`n` above 1, several prompts) takes the first one's
  place, and nobody can free the first one's blocks any more: they are *stranded*.
* A decode whose parameters are incomplete waits for ever: it counts the prompt as loaded elsewhere before it looks at them.
* A request that is for the other role trips an assertion, and the engine dies.

Each pull is a write of its own here; vLLM makes one call of all that are ready in one `Pulls`.

`connector` has the decode's side and says which side a thing is for; `pulls` is what a decode has asked for, `sender` the
prefill's side. Between the sides nothing is shared but what a `Pulls` and a `Pulled` say, even in an engine of both roles.
"""
