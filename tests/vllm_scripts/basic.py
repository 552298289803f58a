from vllm import LLM, SamplingParams

prompts = ["Hello, my name is", "The future of AI is"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)


def main():
    llm = LLM(model="facebook/opt-125m")
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        print(f"Prompt: {output.prompt!r}\nOutput: {output.outputs[0].text!r}")
    assert len(outputs) == 2
    assert outputs[0].finished


if __name__ == "__main__":
    main()
