"""Text in, fixed token blocks out.

`corpus` reads documents, `encoding` turns one document into ids, `blocks` packs them into a memory-mapped
cache, `batches` says which blocks make a step, `module` is the DataModule around it. Nothing here knows about
models, gates or stages.
"""
