use super::*;
use crate::{LayerId, Port, Rate, Servers};
use proptest::prelude::*;
use serde_json::{Value, json};

fn job() -> Job {
    Job {
        layers: vec![Layer::new("conv1", 10), Layer::new("fc", 20)],
        optimizer: Optimizer::default(),
        chunk: ChunkSize::default(),
        placement: Placement::Balanced,
        deterministic: false,
        consistency: Consistency::Bsp,
        scheme: Policy::Auto,
        batch: None,
        checkpoints: Checkpoints::default(),
    }
}

fn book(cluster: Cluster) -> Book {
    let facts = |node| NodeFacts {
        node,
        host: String::new(),
        rack: None,
        tcp: String::new(),
        other_tcp: Vec::new(),
        unix: None,
        version: String::new(),
        tiles: false,
        queue: None,
    };
    let identity = JobId(std::array::from_fn(|i| i as u8));
    let nodes = cluster.node_ids().map(facts).collect();
    Book { version: BOOK_VERSION, identity, epoch: Epoch::FIRST, cluster, nodes, job: job() }
}

/// Every place in `value`, as a path.
fn places(value: &Value, at: &str, all: &mut Vec<String>) {
    all.push(at.to_owned());
    match value {
        Value::Object(fields) => {
            fields.iter().for_each(|(key, value)| places(value, &format!("{at}/{key}"), all));
        }
        Value::Array(items) => {
            items.iter().enumerate().for_each(|(i, v)| places(v, &format!("{at}/{i}"), all));
        }
        _ => {}
    }
}

/// What a broken or hostile coordinator may write.
fn nonsense() -> impl Strategy<Value = Value> {
    let number = prop_oneof![
        Just(0),
        Just(1),
        Just(255),
        Just(65_535),
        Just(1 << 31),
        Just(1 << 40),
        Just(u64::MAX),
        0..300u64,
    ];
    prop_oneof![
        4 => number.prop_map(Value::from),
        1 => Just(Value::Null),
        1 => Just(json!(-1)),
        1 => Just(json!(1e300)),
        1 => Just(json!("colocated+65535")),
        1 => Just(json!("")),
        1 => Just(json!([])),
        1 => Just(json!({})),
        1 => Just(json!([7, 7, 7])),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// A book is refused in words, or a plan can be made of it.
    #[test]
    fn a_book_with_anything_in_it_does_not_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), nonsense()), 1..4),
    ) {
        let cluster = Cluster::new(3, Servers::Mixed(1), 2).unwrap();
        let port = |number| Port { number, rate: Rate::new(1_000_000_000).unwrap() };
        let cluster = cluster.with_ports(vec![port(0), port(0), port(1), port(2)]).unwrap();
        let cluster = cluster.with_hosts(vec![0, 0, 1, 2], vec![0, 0, 1]).unwrap();
        let mut book = book(cluster);
        let kind = LayerKind::Fc { m: 10, n: 20 };
        book.job.layers.push(Layer { kind, rows: Some(4), ..Layer::new("wide", 210) });
        book.job.batch = Some(8);
        let mut book = serde_json::to_value(book).unwrap();
        for (index, value) in changes {
            let mut all = Vec::new();
            places(&book, "", &mut all);
            *book.pointer_mut(&all[index.index(all.len())]).unwrap() = value;
        }
        match serde_json::from_value::<Book>(book) {
            Err(error) => prop_assert!(!error.to_string().is_empty()),
            Ok(book) => {
                let plan = book.plan();
                prop_assert_eq!(plan.layers(), book.job.layers.len());
                for node in book.cluster.node_ids() {
                    book.cluster.partners(node);
                    book.cluster.name(node);
                    let _ = plan.bytes_sent(node, LayerId(0));
                }
                book.tiles();
            }
        }
    }
}

#[test]
fn a_book_that_no_job_can_have_is_refused() {
    let book = serde_json::to_value(book(Cluster::new(2, Servers::Colocated, 1).unwrap()));
    let book = book.unwrap();
    let refused = |at: &str, value: Value| {
        let mut book = book.clone();
        *book.pointer_mut(at).unwrap() = value;
        serde_json::from_value::<Book>(book).unwrap_err().to_string()
    };
    assert!(refused("/cluster/lanes", json!(0)).contains("at least 1 lane"));
    assert!(refused("/cluster/lanes", json!(65_535)).contains("at most 256 lanes"));
    assert!(refused("/cluster/workers", json!(3)).contains("facts of 2 nodes"));
    assert!(refused("/nodes", json!([])).contains("facts of 0 nodes"));
    let large = refused("/job/layers/0/len", json!(1u64 << 44));
    assert!(large.contains("'conv1'") && large.contains("chunks"), "{large}");
}

#[test]
fn the_first_difference_is_named_with_both_sides() {
    let mut other = job();
    assert_eq!(job().difference("worker 0", &other, "worker 1"), None);
    other.optimizer = Optimizer::adam();
    let words = job().difference("worker 0", &other, "worker 1").unwrap();
    assert!(words.contains("update rule is mean on worker 0 but adam"), "{words}");
    other.layers[1].len = 21;
    let words = job().difference("worker 0", &other, "worker 1").unwrap();
    assert!(words.contains("'fc' of 20") && words.contains("'fc' of 21"), "{words}");
    other = job();
    other.layers[0].optimizer = Some(Optimizer::adamw());
    let words = job().difference("worker 0", &other, "worker 1").unwrap();
    assert!(words.contains("10 parameters on worker 0 but 'conv1' of 10"), "{words}");
    assert!(words.contains("10 parameters, adamw on worker 1"), "{words}");
    other = job();
    other.layers[1].up = Encoding::Bf16;
    let words = job().difference("worker 0", &other, "worker 1").unwrap();
    assert!(words.contains("20 parameters on worker 0"), "{words}");
    assert!(words.contains("20 parameters, bf16 up and f32 down on worker 1"), "{words}");
    other = job();
    other.layers.pop();
    let words = job().difference("worker 0", &other, "worker 1").unwrap();
    assert!(words.contains("number of layers is 2 on worker 0 but 1"), "{words}");
}

#[test]
fn one_worker_without_tiles_is_enough_and_servers_do_not_count() {
    let cluster = Cluster::new(2, Servers::Dedicated(1), 1).unwrap();
    let tiles = |[a, b, server]: [bool; 3]| {
        let tiles = [a, b, server];
        let mut book = book(cluster.clone());
        book.nodes.iter_mut().zip(tiles).for_each(|(node, tiles)| node.tiles = tiles);
        book.tiles()
    };
    assert!(tiles([true, true, false]));
    assert!(!tiles([true, false, true]));
}

#[test]
fn a_layers_own_rule_overrules_the_jobs() {
    let mut book = book(Cluster::new(2, Servers::Colocated, 1).unwrap());
    book.job.optimizer = Optimizer::sgd();
    book.job.layers[1].optimizer = Some(Optimizer::adam());
    let text = serde_json::to_string(&book).unwrap();
    let job = serde_json::from_str::<Book>(&text).unwrap().job;
    assert_eq!(job.rule(LayerId(0)), &Optimizer::sgd());
    assert_eq!(job.rule(LayerId(1)), &Optimizer::adam());
    assert_eq!(job.rules().cloned().collect::<Vec<_>>(), [Optimizer::sgd(), Optimizer::adam()]);
}

#[test]
fn a_plan_is_of_its_books_epoch() {
    let mut book = book(Cluster::new(2, Servers::Colocated, 1).unwrap());
    assert_eq!(book.plan().epoch, Epoch::FIRST);
    book.epoch = book.epoch.next();
    assert_eq!(book.plan().epoch.to_string(), "2");
    assert_eq!(book.plan().chunks(LayerId(0)).unwrap().count(), 1);
}

#[test]
fn books_come_back_from_json_as_they_were() {
    let mut book = book(Cluster::new(2, Servers::Mixed(1), 3).unwrap());
    book.job.layers[1].up = Encoding::F16;
    let text = serde_json::to_string(&book).unwrap();
    assert!(text.contains(r#""identity":"000102030405060708090a0b0c0d0e0f","epoch":1,"#), "{text}");
    let layers = r#"{"name":"conv1","kind":"other","len":10},{"name":"fc","kind":"other","len":20,"up":"f16"}"#;
    assert!(text.contains(layers), "{text}");
    assert_eq!(serde_json::from_str::<Book>(&text).unwrap(), book);
}

/// Whatever another process sends, what is read is a book a plan can be made of, or an error.
#[test]
fn nonsense_is_not_read() {
    let book = book(Cluster::new(2, Servers::Colocated, 1).unwrap());
    let refusal = |change: &dyn Fn(&mut Value)| {
        let mut value = serde_json::to_value(&book).unwrap();
        change(&mut value);
        serde_json::from_value::<Book>(value).unwrap_err().to_string()
    };
    let says = |words: &str, change: &dyn Fn(&mut Value)| {
        let refusal = refusal(change);
        assert!(refusal.contains(words), "{refusal}");
    };
    says("at least 1 lane, got 0", &|b| b["cluster"]["lanes"] = 0.into());
    says("at least 1 worker, got 0", &|b| b["cluster"]["workers"] = 0.into());
    says("epoch 0", &|b| b["epoch"] = 0.into());
    says("32 hexadecimal digits", &|b| b["identity"] = "12".into());
    says("facts of 2 nodes in a cluster of 3", &|b| b["cluster"]["workers"] = 3.into());
    says("node 1 in the place of node 0", &|b| b["nodes"][0]["node"] = 1.into());
    says("chunks of 5 to 4 bytes", &|b| {
        b["job"]["chunk"] = serde_json::json!({"min": 5, "max": 4})
    });
    says("unknown variant `f8`", &|b| b["job"]["layers"][0]["up"] = "f8".into());
    says("two layers are called 'fc'", &|b| b["job"]["layers"][0]["name"] = "fc".into());
}

#[test]
fn jobs_that_make_no_sense_say_what_is_wrong() {
    let refusal = |change: &dyn Fn(&mut Job)| {
        let mut job = job();
        change(&mut job);
        job.validate().unwrap_err().to_string()
    };
    assert_eq!(job().validate(), Ok(()));
    assert!(refusal(&|j| j.chunk = ChunkSize { min: 0, max: 3 }).contains("at least 4"));
    assert!(refusal(&|j| j.batch = Some(0)).contains("a batch of 0 samples"));
    assert!(refusal(&|j| j.layers[1].rows = Some(0)).contains("0 rows of layer 'fc'"));
    assert!(refusal(&|j| j.layers[1].len = usize::MAX / 8).contains("no memory"));
    let fc = |m, n, len| {
        let layers = vec![Layer { kind: LayerKind::Fc { m, n }, ..Layer::new("fc", len) }];
        Job { layers, ..job() }.validate()
    };
    assert_eq!([fc(4, 5, 20), fc(4, 5, 24)], [Ok(()), Ok(())]);
    let words = fc(4, 5, 25).unwrap_err().to_string();
    assert!(words.contains("20 parameters, or 4 more with a bias, got 25"), "{words}");
    assert!(fc(0, 5, 0).is_err() && fc(usize::MAX, 2, usize::MAX).is_err());
    let mut rule = Optimizer::sgd();
    if let Optimizer::Sgd { momentum, .. } = &mut rule {
        *momentum = f32::NAN;
    }
    assert!(refusal(&|j| j.optimizer = rule.clone()).contains("momentum"));
    let words = refusal(&|j| j.layers[1].optimizer = Some(rule.clone()));
    assert!(words.contains("layer 'fc'") && words.contains("momentum"), "{words}");
}
