"""What arithmetic costs beside a busy tensor core (docs/performance.md, Where the time goes).

    python tools/wgmma_contention.py [--keep FILE.cu]

One block: some warpgroups issue wgmma back to back, others only arithmetic, for as long. Prints
cycles of a wgmma (by clock()) and instructions a cycle of one quarter of the SM. Needs nvcc and a
GPU of compute capability 9.0.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from generator.toolchain import find_nvcc

# Eight chains a thread, so that each instruction waits for the one eight before.
TWO = 'asm volatile("%s" : "+r"(r[i]) : "r"(s[0]), "r"(s[1]));'
FLOAT = 'asm volatile("%s" : "+f"(f[i]) : "f"(g[0]), "f"(g[1]));'
LOP3 = TWO % "lop3.b32 %0, %0, 0x3c3c3c3c, %1, 0x6a;"
HFMA2 = TWO % "fma.rn.f16x2 %0, %0, %1, %2;"
AND_THEN_HFMA2 = "{.reg .b32 c; and.b32 c, %0, 0x003c003c; fma.rn.f16x2 %0, c, %1, %2;}"
# Name, instructions of one statement, statement.
KINDS = (
    ("LOP3", 1, LOP3),
    ("HFMA2", 1, HFMA2),
    ("HADD2", 1, TWO % "{.reg .b32 c; mov.b32 c, 0x3c003c00; add.rn.f16x2 %0, %0, c;}"),
    ("PRMT", 1, TWO % "prmt.b32 %0, %0, %1, %2;"),
    ("SHF", 1, TWO % "shf.l.wrap.b32 %0, %0, %0, 8;"),
    ("IMAD", 1, TWO % "mad.lo.s32 %0, %0, %1, %2;"),
    ("FFMA", 1, FLOAT % "fma.rn.f32 %0, %0, %1, %2;"),
    ("FMUL", 1, FLOAT % "mul.rn.f32 %0, %0, %1;"),
    ("LOP3, then HFMA2 of it", 2, TWO % AND_THEN_HFMA2),
    ("LOP3 | HFMA2", 1, f"if (i % 2) {{ {LOP3} }} else {{ {HFMA2} }}"),
)
# Columns of the activations' operand; whether the weights' operand is in registers; warpgroups.
WGMMA = ((64, True, 4), (64, False, 4), (128, True, 3), (256, True, 3))

KERNEL = """
template <int N, int RS, int KIND, int WGS>
__global__ void __launch_bounds__(WGS * 128, 1) k(uint32_t* out, int tensor, int alus, int iters) {
  extern __shared__ __align__(1024) uint8_t sm[];
  __shared__ volatile int stop;
  for (int i = threadIdx.x; i < 16384; i += WGS * 128)
    reinterpret_cast<uint32_t*>(sm)[i] = 0x3c003800u ^ (i * 2654435761u & 0x03ff03ffu);
  if (threadIdx.x == 0) stop = 0;
  __syncthreads();
  const int w = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(sm));
  const uint64_t desc = 1ull << 62 | 64ull << 32 | 1ull << 16 | (base & 0x3ffff) >> 4;
  uint32_t count = 0;
  const uint32_t start = clock();
  if (w < tensor) {
    float d[N / 2];
    uint32_t a[8];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) d[i] = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i] = 0x38003a00u + threadIdx.x * 77 + i * 1234567;
#pragma unroll 1
    for (int it = 0; it < iters; ++it) {
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int i = 0; i < 8; ++i)
        Wgmma<N, RS>::go(d, a + 4 * (i & 1), desc + 2 * (i & 3), desc + 512 + 2 * (i & 3));
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    stop = 1;
    count = iters * 8;
    float t = 0;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      asm volatile("" : "+f"(d[i])::"memory");
      t += d[i];
    }
    if (t == 1.2345f) out[100] = 1;
  } else if (w >= WGS - alus) {
    uint32_t r[8], s[2];
    float f[8], g[2];
    for (int i = 0; i < 8; ++i) r[i] = threadIdx.x + i, f[i] = i;
    for (int i = 0; i < 2; ++i) s[i] = threadIdx.x * 3 + i * 0x01230456, g[i] = 1.f + i;
    while (tensor ? !stop : count < 64 * 2000) {
#pragma unroll
      for (int i = 0; i < 4; ++i) work<KIND>(r, s, f, g);
      count += 256;
    }
    uint32_t t = 0;
    for (int i = 0; i < 8; ++i) t += r[i] + __float_as_uint(f[i]);
    if (t == 12345) out[101] = t;
  }
  const uint32_t took = clock() - start;
  if (threadIdx.x % 128 == 0) out[w] = count, out[8 + w] = took;
}

template <int N, int RS, int KIND, int WGS> void one(const char* what, int each) {
  uint32_t *d, h[16];
  cudaMalloc(&d, 1024);
  auto kernel = k<N, RS, KIND, WGS>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 100000);
  for (int tensor = 0; tensor <= 2; ++tensor)
    for (int alus = 0; alus <= 2; ++alus) {
      if (tensor + alus > WGS || tensor + alus == 0 || (alus == 0 && KIND != 0)) continue;
      cudaMemset(d, 0, 1024);
      kernel<<<1, WGS * 128, 100000>>>(d, tensor, alus, 2000);
      cudaMemcpy(h, d, 64, cudaMemcpyDeviceToHost);
      double t = 0, a = 0;
      for (int w = 0; w < tensor; ++w) t += double(h[w]) / h[8 + w];
      for (int w = WGS - alus; w < WGS; ++w) a += double(h[w]) / h[8 + w];
      printf("m64n%dk16 %s | %-22s | warpgroups with wgmma %d, with arithmetic %d | ", N,
             RS ? "registers" : "shared   ", what, tensor, alus);
      printf("%6.1f cycles a wgmma, %5.3f instructions a cycle\\n", t ? 1 / t : 0., a * each);
    }
  if (const cudaError_t error = cudaGetLastError()) {
    printf("failed: %s\\n", cudaGetErrorString(error));
    exit(1);
  }
  cudaFree(d);
}
"""


def wgmma(n: int, registers: bool) -> str:
    """m64n`n`k16 as a specialisation of Wgmma."""
    sums = n // 2
    d = ", ".join(f"%{i}" for i in range(sums))
    a = "{" + ", ".join(f"%{sums + i}" for i in range(4)) + "}" if registers else f"%{sums}"
    b = sums + (4 if registers else 1)
    tail = "p, 1, 1, 0;" if registers else "p, 1, 1, 0, 0;"
    what = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16 {{{d}}}, {a}, %{b}, {tail}"
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(sums))
    weights = ", ".join(f'"r"(a[{i}])' for i in range(4)) if registers else '"l"(da)'
    return (
        f"template <> struct Wgmma<{n}, {int(registers)}> {{\n"
        "  static __device__ void go(float* d, const uint32_t* a, uint64_t da, uint64_t db) {\n"
        f'    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{b + 1}, 0;\\n{what}\\n}}"\n'
        f'                 : {outputs} : {weights}, "l"(db), "r"(1));\n  }}\n}};\n'
    )


def source() -> str:
    """The whole program."""
    parts = [f"#include <{header}>\n" for header in ("cstdint", "cstdio", "cstdlib")]
    parts.append("template <int N, int RS> struct Wgmma;\n")
    parts += [wgmma(n, registers) for n, registers, _ in WGMMA]
    head = "__forceinline__ void work"
    arguments = "(uint32_t* r, const uint32_t* s, float* f, const float* g)"
    parts.append(f"template <int KIND> __device__ {head}{arguments};\n")
    for i, (_, _, statement) in enumerate(KINDS):
        loops = "#pragma unroll\n  for (int j = 0; j < 8; ++j)\n#pragma unroll\n"
        body = f"{loops}    for (int i = 0; i < 8; ++i) {{ {statement} }}\n"
        parts.append(f"template <> __device__ {head}<{i}>{arguments} {{\n{body}}}\n")
    parts.append(KERNEL)
    calls = [
        f'  one<{n}, {int(registers)}, {i}, {groups}>("{name}", {each});\n'
        for n, registers, groups in WGMMA
        for i, (name, each, _) in enumerate(KINDS)
    ]
    return "".join((*parts, "int main() {\n", *calls, "}\n"))


def compile_program(text: str, folder: Path) -> Path:
    """Compiles the program for sm_90a; CalledProcessError if nvcc refuses."""
    path, program = folder / "contention.cu", folder / "contention"
    path.write_text(text)
    options = ["-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-cudart", "static"]
    nvcc = str(find_nvcc(os.environ))
    subprocess.run([nvcc, *options, "-o", str(program), str(path)], check=True)
    return program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, help="write the program here, too")
    arguments = parser.parse_args()
    text = source()
    if arguments.keep:
        arguments.keep.write_text(text)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([str(compile_program(text, Path(folder)))], check=True)


if __name__ == "__main__":
    main()
