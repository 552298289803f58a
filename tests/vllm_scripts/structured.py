import json
from enum import Enum

from pydantic import BaseModel
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams


class Color(str, Enum):
    red = "red"
    blue = "blue"


class Car(BaseModel):
    fast: bool
    color: Color


llm = LLM(model="facebook/opt-125m", max_model_len=512)


def ask(**structured) -> str:
    params = SamplingParams(
        max_tokens=200, structured_outputs=StructuredOutputsParams(**structured)
    )
    return llm.generate("A car:", sampling_params=params, use_tqdm=False)[0].outputs[0].text


assert ask(choice=["Positive", "Negative"]) in ("Positive", "Negative")
car = Car.model_validate(json.loads(ask(json=Car.model_json_schema(), disable_any_whitespace=True)))
print(car)
assert ask(regex=r"\d{3}").isdigit()
