"""The step of one decoder layer: forward without a graph, backward chunk by chunk. The decision
whether a layer may run in chunks is made in `admission`.

Tensors of one layer call, with B rows, T tokens in chunks of C, H query heads, H_kv key heads;
"wide" is promote_types(dtype, float32). A tensor has the full sequence's shape, or a chunk's.

    from the caller
        hidden_states      [..., B, T, h]       the layer's input, detached; chunks are views of it
        arguments          by name              cut to chunks if they have a dimension of tokens; a
                                                leaf of each chunk's graph if they want a gradient
                                                (`arguments.py`)
        parameters         in their modules     replaced by detached aliases, "shadows", while
                                                chunks are differentiated (`shadows.py`)
    passed from chunk to chunk (`chunk_states.py`)
        K, V               [B, T, H_kv, D]      of all tokens so far; one buffer, or a tile a chunk
        dK, dV             the same, wide       sums over the chunks that read K and V; complete
                                                once their own chunk is differentiated
        states             by `Key`             of a recurrence or convolution; in backward also the
                                                gradients of a chunk's end states
    saved by forward for backward (`saved.py`), on the device or on the host
        x                  [..., B, C, h]       a chunk's hidden_states
        attended           [B, C, H, D_v]       output of attention, with its logsumexp [B, H, C]
                                                in float32 or float64
        products           [B, C, out]          outputs of Linears, by `saves`
        start states       by `Key`
    made in backward, for one chunk at a time
        the graph          of the recomputed chunk, from leaves of x, arguments, states and shadows
                           to its outputs
        upstream           [..., B, C, h]       the chunk's part of the incoming gradient, a view
    returned
        the output         [..., B, T, h]       and other outputs, joined from chunks (`call.py`)
        dx                 [..., B, T, h]       written chunk by chunk, into the incoming gradient's
                                                buffer if no other code holds it (`gradients.py`)
        parameters' grads  as parameters        wide sums over chunks, cast to the parameter's dtype
                                                at the end
"""
