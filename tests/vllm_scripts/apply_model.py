import torch
from vllm import LLM


def num_modules(model: torch.nn.Module) -> int:
    return len(list(model.modules()))


def device_of(worker, prefix: str) -> str:
    return prefix + worker.platform.device.type


llm = LLM(model="facebook/opt-125m", enforce_eager=True)
llm.apply_model(lambda model: print(model.__class__))
assert llm.apply_model(num_modules)[0] > 5
print(llm.collective_rpc(device_of, args=("device: ",)))
assert llm.get_world_size() == 1
