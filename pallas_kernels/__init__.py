"""Attention kernels of DeepSeek Sparse Attention: pure functions that know no mesh and no config."""

from pallas_kernels.dense_mla.op import dense_mla as dense_mla
from pallas_kernels.grouped_matmul.op import grouped_matmul as grouped_matmul
from pallas_kernels.indexer_kl.op import indexer_kl as indexer_kl
from pallas_kernels.indexer_kl.op import sparse_indexer_kl as sparse_indexer_kl
from pallas_kernels.indexer_scores.op import indexer_scores as indexer_scores
from pallas_kernels.paged_indexer.op import paged_indexer_topk as paged_indexer_topk
from pallas_kernels.paged_mla.op import paged_mla as paged_mla
from pallas_kernels.sparse_mla.op import sparse_mla as sparse_mla
from pallas_kernels.topk_select.op import indexer_topk as indexer_topk
from pallas_kernels.topk_select.op import indexer_topk_mask as indexer_topk_mask
from pallas_kernels.topk_select.op import topk_select as topk_select
