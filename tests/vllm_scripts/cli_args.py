from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser


def create_parser():
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="facebook/opt-125m")
    group = parser.add_argument_group("Sampling parameters")
    group.add_argument("--max-tokens", type=int)
    group.add_argument("--temperature", type=float)
    return parser


def main(args: dict):
    max_tokens = args.pop("max_tokens")
    temperature = args.pop("temperature")
    assert args["tensor_parallel_size"] == 1
    llm = LLM(**args)
    sampling_params = llm.get_default_sampling_params()
    if max_tokens is not None:
        sampling_params.max_tokens = max_tokens
    if temperature is not None:
        sampling_params.temperature = temperature
    (output,) = llm.generate(["The president of the United States is"], sampling_params)
    assert len(output.outputs[0].token_ids) == 5


if __name__ == "__main__":
    main(vars(create_parser().parse_args(["--max_tokens", "5", "--max-model-len", "128"])))
