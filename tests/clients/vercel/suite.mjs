// Vercel's AI SDK against a server whose shard follows `../scripted.py`: each of its three providers.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { createAnthropic } from '@ai-sdk/anthropic'
import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { generateText, stepCountIs, streamText, tool } from 'ai'
import { z } from 'zod'

const url = process.env.LEGATO_SCRIPTED_URL
const guarded = process.env.LEGATO_GUARDED_URL
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: 'none' })
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: 'none' })
const compatible = createOpenAICompatible({ name: 'legato', baseURL: `${url}/v1`, apiKey: 'none' })
const models = {
  responses: openai('any'),
  messages: anthropic('any'),
  chat: compatible('any'),
}
const thinking = { anthropic: { thinking: { type: 'enabled', budgetTokens: 1024 } }, openai: { reasoningSummary: 'auto', forceReasoning: true } }
const weather = tool({
  description: 'The weather in a city',
  inputSchema: z.object({ city: z.string(), unit: z.enum(['celsius', 'fahrenheit']) }),
  execute: async ({ city }) => (city === 'Paris' ? 'sunny' : 'unknown'),
})

for (const [name, model] of Object.entries(models)) {
  test(`${name}: a text`, async () => {
    const { text, usage } = await generateText({ model, prompt: 'What is two and two?', maxRetries: 0 })
    assert.equal(text, 'Four.')
    assert.ok(usage.outputTokens > 3)
  })

  test(`${name}: a stream`, async () => {
    const { textStream } = streamText({ model, prompt: 'What is two and two?', maxRetries: 0 })
    let text = ''
    for await (const part of textStream) text += part
    assert.equal(text, 'Four.')
  })

  test(`${name}: reasoning`, async () => {
    const { reasoningText } = await generateText({
      model, prompt: 'What is two and two?', providerOptions: thinking, maxRetries: 0,
    })
    assert.equal(reasoningText, 'Two and two.')
  })

  test(`${name}: a tool is called, and its result used`, async () => {
    const { text, steps } = await generateText({
      model,
      prompt: 'What is the weather in Paris?',
      tools: { get_weather: weather },
      stopWhen: stepCountIs(3),
      providerOptions: thinking,
      maxRetries: 0,
    })
    assert.equal(text, 'It is sunny in Paris.')
    assert.equal(steps.length, 2)
    assert.deepEqual(steps[0].toolCalls[0].input, { city: 'Paris', unit: 'celsius' })
  })
}

test('responses: a tool is called, and its result used, without a store', async () => {
  const options = { ...thinking.openai, store: false, include: ['reasoning.encrypted_content'] }
  const { text } = await generateText({
    model: models.responses,
    prompt: 'What is the weather in Paris?',
    tools: { get_weather: weather },
    stopWhen: stepCountIs(3),
    providerOptions: { openai: options },
    maxRetries: 0,
  })
  assert.equal(text, 'It is sunny in Paris.')
})

test('errors have the status of the server', async () => {
  const provider = createOpenAI({ baseURL: `${guarded}/v1`, apiKey: 'wrong' })
  await assert.rejects(generateText({ model: provider('any'), prompt: 'hi', maxRetries: 0 }), (error) => error.statusCode === 401)
})
