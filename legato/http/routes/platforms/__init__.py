"""The routes by which hosting platforms call a model: SageMaker, Vertex AI and KServe.

They are other words for the same requests, so nothing is generated here: each takes its body apart and hands what it
finds to the native or to OpenAI's routes.
"""
