cd exp
export PYTHONPATH=$PWD/..:$PYTHONPATH
rm -rf /tmp/wide_turns; mkdir -p /tmp/wide_turns
export TURNS=5
run() { n=$1; l=$2; shift 2; timeout $l "$@" > $RESULT/$n.txt 2>&1; echo "rc $?" >> $RESULT/$n.txt; touch /tmp/wide_turns/gone-$n; }
run g1 40 python3 bench_wide.py gluon 16,32,64,128 &
run g2 40 python3 bench_wide.py gluon 16,32,64 warps=4 early=1 head=0 &
run g3 40 python3 bench_wide.py gluon 64,128 early=1 head=0 &
run g4 40 python3 bench_wide.py gluon 64 warps=4 head=0 &
run present 40 python3 bench_wide.py present 64,128 &
wait
run final $((98 - SECONDS)) python3 check_final.py
cd $RESULT; for f in g1 g2 g3 g4 present final; do echo "== $f"; tail -60 $f.txt | grep -v "check .* ok"; done
grep -q "^FWD" final.txt
