//! What attention moves, counted by the virtual GPU. In a process of its own, because counts are of a process.

use quern_kernels::{
    cpu::kv::{KvLayer, KvType},
    cuda::{
        Attend, Batch, Buffer, Device, KvPool,
        acts::{Acts, Form},
        attend::Params,
        batch::{Chunk, Shape},
        ops::{Ops, RopeAppend},
    },
    exec::Mask,
};

#[test]
fn keys_and_values_are_read_once_and_banks_do_not_collide() {
    let gpu = quern_vgpu::load();
    gpu.set("traffic", "on");
    let device = Device::open(0).unwrap();
    let (ops, attend) = (Ops::new(&device).unwrap(), Attend::new(&device).unwrap());
    let (heads, kv_heads, tokens) = (8, 2, 480);
    for (kind, d, kernel) in [
        (KvType::F16, 128, ["narrow_f16_128", "wide_f16_128"]),
        (KvType::F16, 64, ["narrow_f16_64", "wide_f16_64"]),
        (KvType::Int8, 128, ["narrow_int8_128", "wide_int8_128"]),
    ] {
        let shape = Shape { heads, kv_heads, head_dim: d, window: None };
        let pool = KvPool::new(&device, &[KvLayer { kv_heads, head_dim: d }], tokens / 16, kind).unwrap();
        let places: Vec<u32> = (0..tokens as u32).collect();
        let places = Buffer::of(&device, "a test", &places).unwrap();
        let stride = (heads + 2 * kv_heads) * d;
        let values: Vec<f32> = (0..tokens * stride).map(|i| (i * 37 % 64) as f32 / 32.0 - 1.0).collect();
        let qkv = Buffer::of(&device, "a test", &values).unwrap();
        let what = RopeAppend { rope: None, norms: None, places: places.ptr(), heads };
        ops.rope_append(qkv.ptr(), &what, &pool, 0, tokens).unwrap();
        let blocks: Vec<u32> = (0..tokens as u32 / 16).collect();
        for (rows, kernel) in [1, 64].into_iter().zip(kernel) {
            let mut batch = Batch::new(&device, &[shape], rows).unwrap();
            batch.set(&[Chunk { rows, start: tokens - rows, blocks: &blocks, mask: Mask::Causal }], rows).unwrap();
            let to = Acts::new(&device, Form::F16, rows, heads * d).unwrap();
            let params = Params { layer: 0, heads, scale: 0.1, window: None, cap: None, sinks: None };
            device.synchronize().unwrap();
            gpu.stats();
            attend.run(&ops, qkv.ptr(), &pool, &params, &batch, None, &to, rows).unwrap();
            device.synchronize().unwrap();
            let stats = gpu.stats();
            let counts = &stats[kernel];
            let cache = tokens / 16 * kv_heads * kind.head_bytes(d);
            let needed = (cache + rows * heads * d * 4) as f64;
            let read = counts.count("unique_read") as f64;
            if rows == 1 {
                assert!(read <= 1.05 * needed, "{kernel}: {read} bytes read, {needed} are needed");
            }
            let waves = counts.ratio("shared_waves", "shared_ideal");
            assert!(waves <= 1.1, "{kernel}: {waves} shared waves per ideal one");
            let sectors = counts.ratio("sectors", "ideal_sectors");
            assert!(sectors <= 1.05, "{kernel}: {sectors} sectors per ideal one");
        }
    }
}
